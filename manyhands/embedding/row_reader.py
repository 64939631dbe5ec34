"""Lookup of rows in a table that another process updates, in shared memory; native/rows.c does the work.

A reader changes nothing and blocks no process. The rows it returns are consistent: all from one moment between two
updates. If it could not read them so, it returns False, and the caller retries or asks the owner. It follows the table
to larger regions. Start reading at `RowReader.look_up`.
"""

from __future__ import annotations

from torch import Tensor

from manyhands.comm.host_memory import Memory, Segment
from manyhands.embedding.row_optimizers import TableSpec
from manyhands.embedding.row_table import NEWEST, open_region, region_register
from manyhands.native import library

__all__ = ["RowReader"]


class RowReader:
    """One table, as any process but its owner can read it at any time."""

    def __init__(self, spec: TableSpec, memory: Memory) -> None:
        self._spec, self._memory, self._rule = spec, memory, spec.rule()
        self._register = region_register(spec, memory)
        self._segment: Segment | None = None

    def look_up(self, ids: Tensor, to: Tensor, at_most: int = NEWEST) -> bool:
        """Copy the rows of `ids` into `to`. False: an update is in progress, or there is no table yet.

        If the last update is later than `at_most`, rows are as they were before it; older versions are not available.
        """
        return self.look_up_at(ids.data_ptr(), len(ids), to.data_ptr(), at_most)

    def look_up_at(self, ids: int, count: int, to: int, at_most: int, places: int = 0) -> bool:
        """The same by address: of int64 ids and of the float32 output, both contiguous.

        `places` is the address of int64 indices of the rows in the output.
        """
        if self._segment is None and not self._open():
            return False
        found = self._peek(ids, count, to, places, at_most)
        if found == library.ROWS_GONE:
            self.close()
            found = self._peek(ids, count, to, places, at_most) if self._open() else found
        return bool(found == 0)

    def _peek(self, ids: int, count: int, to: int, places: int, at_most: int) -> int:
        assert self._segment is not None
        return int(library.rows_peek(self._segment.address, self._room, self._rule, ids, count, to, places, at_most))

    def _open(self) -> bool:
        """Open the table's current region; the table may have left it by then."""
        where = self._register.read()
        if not where:
            return False
        _, segment = open_region(self._spec, self._memory, where)
        room = library.rows_room(segment.address, segment.num_bytes)
        if room is None:
            segment.close()
            return False
        self._segment, self._room = segment, room
        return True

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None
