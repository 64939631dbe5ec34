"""Gradients of embedding rows from a worker to servers of its host: in memory beside the lease's gradient buffer.

The worker writes once, for all servers; the message that reports the gradient says where. As with dense gradients, a
server's copy counts if the lease's fill id was still there afterwards. Start reading at `RowGradientHandoff.put`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from manyhands.comm.host_memory import Memory, Segment
from manyhands.embedding.row_layer import TableGradient
from manyhands.embedding.row_table import PARTS, in_parts
from manyhands.errors import EnvironmentProblem
from manyhands.parameter_server.protocol.messages import Handed

__all__ = ["MOST_MARKS", "RowGradientHandoff"]

FIRST_BYTES, MOST_BYTES = 2**16, 2**36
MOST_MARKS = 512
"""How many buffers can be marked with a step."""
_LINE = 64


class RowGradientHandoff:
    """Regions for gradients of embedding rows, by the number of the lease's buffer; each grows as needed."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._regions: dict[str, Segment] = {}
        self._longest: dict[int, int] = {}

    def put(self, row: int, contributions: Sequence[TableGradient]) -> list[Handed]:
        """Write these for servers, and return where. Each one's ids are ordered by part."""
        sizes = [_num_bytes(len(one.ids), one.gradients.shape[1]) for one in contributions]
        self._longest[row] = max(self._longest.get(row, FIRST_BYTES), 1 << (sum(sizes) - 1).bit_length())
        region, found, at = self._region(row, self._longest[row]), list[Handed](), 0
        for (table, ids, gradients), num_bytes in zip(contributions, sizes, strict=True):
            is_ordered, bounds = in_parts(ids)
            assert is_ordered, f"ids of table {table!r} come from `unique`"
            for to, value in zip(_views(region, at, len(ids), gradients.shape[1]), (ids, gradients), strict=True):
                to.copy_(value)
            found.append(Handed(table, region.num_bytes, at, bounds))
            at += num_bytes
        return found

    def mark(self, row: int, step: int) -> None:
        """The gradients beside this buffer are of that step, for servers that read without a lease; 0 while written."""
        self._marks.words()[row] = step

    def step(self, row: int) -> int:
        found: int = self._marks.words()[row]
        return found

    @property
    def _marks(self) -> Segment:
        return self._region_of("steps of gradients of rows", 8 * MOST_MARKS)

    def take(self, row: int, one: Handed, parts: Sequence[int], dim: int) -> TableGradient:
        """A copy of what was put there for these parts."""
        ids, gradients = _views(self._region(row, one.region), one.at, one.bounds[-1], dim)
        if len(parts) == PARTS:
            return TableGradient(one.table, ids.clone(), gradients.clone())
        mine = [slice(one.bounds[part], one.bounds[part + 1]) for part in parts]
        return TableGradient(
            one.table, torch.cat([ids[some] for some in mine]), torch.cat([gradients[some] for some in mine])
        )

    def has(self, row: int, one: Handed, dim: int) -> bool:
        """Whether this can be read from there."""
        ascends = all(start <= stop for start, stop in pairwise([0, *one.bounds]))
        sound = len(one.bounds) == PARTS + 1 and ascends and one.bounds[0] == 0 and one.at >= 0 and one.at % _LINE == 0
        if not sound or not one.at + _num_bytes(one.bounds[-1], dim) <= one.region <= MOST_BYTES:
            return False
        try:
            self._region(row, one.region)
        except EnvironmentProblem:  # no worker has put anything there: there would be no room for it
            return False
        return True

    def _region(self, row: int, num_bytes: int) -> Segment:
        return self._region_of(f"gradients of rows {row}, {num_bytes} bytes", num_bytes)

    def _region_of(self, name: str, num_bytes: int) -> Segment:
        if name not in self._regions:
            self._regions[name] = self._memory(name, num_bytes)
        return self._regions[name]


def _num_bytes(count: int, dim: int) -> int:
    """Ids, and after them gradients, each beginning a cache line."""
    return _lines(8 * count) + _lines(4 * dim * count)


def _views(region: Segment, at: int, count: int, dim: int) -> tuple[Tensor, Tensor]:
    if not count:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dim)
    ids = torch.frombuffer(region.buffer, dtype=torch.int64, count=count, offset=at)
    gradients = torch.frombuffer(region.buffer, dtype=torch.float32, count=count * dim, offset=at + _lines(8 * count))
    return ids, gradients.view(count, dim)


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE
