"""Rows on parameter servers of this host, looked up where they are: in memory that workers and servers share.

Nobody waits for a server that changes rows meanwhile: a part that it is at is looked at again after the others, and
asked for in a message if that has not helped. Start reading at `SharedRows.look_up`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from manyhands.embedding.row_optimizers import TableSpec
from manyhands.embedding.row_reader import RowReader
from manyhands.embedding.row_table import NEWEST
from manyhands.parameter_server.memory.versioned_memory import Memory
from manyhands.parameter_server.tables.server_tables import PARTS, within

__all__ = ["SharedRows"]

# An update of a part does not take long; longer if its server has to wait for a core, or is dead.
ROUNDS = 3


class SharedRows:
    """All parts of one table, which servers change. It changes nothing."""

    def __init__(self, spec: TableSpec, memory: Memory) -> None:
        self._parts = [RowReader(spec, within(memory, part)) for part in range(PARTS)]

    def look_up(
        self, ids: Tensor, bounds: Sequence[int], to: Tensor, at_most: int = NEWEST, places: Tensor | None = None
    ) -> list[int]:
        """Rows of `ids`, which come in the order of parts, into `to`; which parts are left, to be asked for.

        Those of a part are of one moment; or as they were before an update beyond `at_most`. `bounds` says where each
        part begins. With `places`, each row goes to the one of `to` that they say. All tensors are without gaps.
        """
        at_ids, at_rows, row_bytes = ids.data_ptr(), to.data_ptr(), 4 * to.shape[-1]
        at_places = 0 if places is None else places.data_ptr()

        def look_up(part: int) -> bool:
            start, stop = bounds[part], bounds[part + 1]
            reader, some, num = self._parts[part], at_ids + 8 * start, stop - start
            if at_places:
                return reader.look_up_at(some, num, at_rows, at_most, at_places + 8 * start)
            return reader.look_up_at(some, num, at_rows + row_bytes * start, at_most)

        left = [part for part in range(PARTS) if bounds[part] < bounds[part + 1]]
        for _ in range(ROUNDS):
            left = [part for part in left if not look_up(part)]
        return left
