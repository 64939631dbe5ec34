"""Memory that workers and parameter servers of one host share: weights, optimizer states, gradients, progress.

The host's agent owns all of it, so it outlives every worker and server. Version n of the weights, made by n updates,
is in copy n of a ring; an update reads one version and writes the next, so a server that is killed in between leaves
the version before intact. The server's `Register`, written last, says which version counts. Each gradient buffer has a
fill id. Start reading at `VersionedMemory`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.comm.host_memory import Memory, Segment
from manyhands.comm.shared_register import JOURNAL_ENTRY_BYTES, Journal, Register
from manyhands.native import library
from manyhands.parallel.model.flat_layout import Flat, lay_out
from manyhands.parallel.weights.shared_memory_weights import SharedCopy

__all__ = [
    "JOURNAL_LENGTH",
    "Attendance",
    "StateTorn",
    "VersionedMemory",
    "copy_large_",
    "layout_name",
    "open_register",
]


LARGE_BYTES = 2**20


def copy_large_(target: Tensor, source: Tensor) -> None:
    """A faster `target.copy_(source)`, which also reads what it overwrites. Both are in host memory."""
    same_bytes = target.dtype == source.dtype and target.shape == source.shape
    dense = same_bytes and target.is_contiguous() and source.is_contiguous()
    if library is None or not dense or target.nbytes < LARGE_BYTES:
        target.copy_(source)
    else:
        library.copy(target.data_ptr(), source.data_ptr(), target.nbytes)


REGISTER_BYTES = 2**21
JOURNAL_LENGTH = 4096
_PAGE = 4096


class StateTorn(Exception):
    """A server was killed during an update in place: its optimizer states belong to no version."""

    def __init__(self, server: int, version: int) -> None:
        super().__init__(f"server {server} had made {version} updates")
        self.server, self.version = server, version


def layout_name(names: Sequence[str], params: Sequence[Tensor]) -> str:
    """The name of the memory for these trained parameters: another one when others are trained."""
    described = [f"{name} {tuple(param.shape)} {param.dtype}" for name, param in zip(names, params, strict=True)]
    return "served " + hashlib.blake2s("\n".join(described).encode(), digest_size=8).hexdigest()


class Attendance:
    """Which servers are up, as each reports for itself; a dead one still counts as up until it is replaced."""

    def __init__(self, memory: Memory) -> None:
        self._segment = memory("attendance of servers", _PAGE)

    def mark(self, server: int, *, up: bool) -> None:
        self._segment.buffer[server] = up

    def has_all(self, servers: int) -> bool:
        return self._segment.buffer[:servers] == b"\1" * servers


def open_register(memory: Memory, server: int) -> Register:
    """The last `Open` that a server received; its location does not depend on any layout."""
    return Register(memory(f"course of server {server}", REGISTER_BYTES))


class VersionedMemory:
    """The memory of one layout of trained parameters, and of the model's buffers.

    Regions are allocated on first use.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        buffers: Sequence[Tensor],
        memory: Memory,
        layout: str,
        *,
        copies: int,
        num_rows: int,
        statistics_numel: int = 0,
        slices_per_row: int = 1,
        state_copies: int = 2,
    ) -> None:
        """Each gradient buffer has room for the batch statistics of `slices_per_row` slices.

        With one copy of the optimizer states, an update that was begun and not committed leaves no valid one.
        """
        self.state_copies = state_copies
        self._statistics_numel, self._slices_per_row = statistics_numel, slices_per_row
        self.flat: Flat = lay_out(params)
        self.params, self.layout, self.copies, self.num_rows = list(params), layout, copies, num_rows
        self._buffers, self._flat_buffers = list(buffers), lay_out(buffers)
        self._memory = memory
        self._regions: dict[str, SharedCopy] = {}
        self._segments: dict[str, Segment] = {}

    def weights(self, version: int) -> SharedCopy:
        return self._region(f"weights {version % self.copies} of {self.copies}")

    def states(self, name: str, version: int) -> SharedCopy:
        """Two copies are enough: only servers read them while there are updates."""
        return self._region(f"state {name} {version % self.state_copies}")

    def row(self, number: int) -> SharedCopy:
        return self._region(f"row {number}")

    def buffers(self, version: int) -> list[Tensor]:
        """The model's buffers of version n."""
        name, segment = self._buffers_name(version), self.buffers_segment(version)
        if name not in self._regions:
            self._regions[name] = SharedCopy(segment, self._flat_buffers.views(self._buffers, segment))
        return self._regions[name].views

    def buffers_segment(self, version: int) -> Segment:
        return self.segment(self._buffers_name(version), _pages(self._flat_buffers.num_bytes))

    def _buffers_name(self, version: int) -> str:
        return f"buffers {version % self.copies} of {self.copies}"

    def write_statistics(self, row: int, slices: Sequence[Tensor]) -> None:
        """The batch statistics after each slice of this gradient, in order."""
        if self._statistics_numel:
            region = self._statistics(row)
            region[0, 0] = len(slices)
            region[1 : 1 + len(slices)] = torch.stack(list(slices))

    def read_statistics(self, row: int) -> list[Tensor]:
        if not self._statistics_numel:
            return []
        region = self._statistics(row)
        return list(region[1 : 1 + int(region[0, 0])].clone())

    def statistics(self, row: int) -> Segment | None:
        """Where they are; None if the model has none."""
        numel = (1 + self._slices_per_row) * self._statistics_numel
        return self.segment(f"statistics {row}", _pages(8 * numel)) if numel else None

    def _statistics(self, row: int) -> Tensor:
        shape, segment = (1 + self._slices_per_row, self._statistics_numel), self.statistics(row)
        assert segment is not None
        return torch.frombuffer(segment.buffer, dtype=torch.float64, count=shape[0] * shape[1]).view(shape)

    def segment(self, name: str, num_bytes: int) -> Segment:
        if name not in self._segments:
            self._segments[name] = self._memory(f"{self.layout}/{name}", num_bytes)
        return self._segments[name]

    def num_bytes(self, states: Sequence[str], more_rows: int = 0) -> int:
        """Total length of all regions of weights, buffers, optimizer states and gradients."""
        whole, buffers = _pages(self.flat.num_bytes), _pages(self._flat_buffers.num_bytes)
        regions = self.copies + len(states) * self.state_copies + self.num_rows + more_rows
        return regions * whole + self.copies * buffers

    def allot_all(self, states: Sequence[str]) -> None:
        """Allocate everything now: if there is no room, nothing has begun yet."""
        for version in range(self.copies):
            self.weights(version)
            self.buffers(version)
        for name in states:
            for version in range(self.state_copies):
                self.states(name, version)
        for number in range(self.num_rows):
            self.row(number)

    # ---- progress ----

    def standing(self, server: int) -> Register:
        """What a server has applied, and what else its successor needs; committed with every update."""
        return Register(self.segment(f"standing of server {server}", REGISTER_BYTES))

    def intent(self, server: int) -> Register:
        """The update of embedding rows that a server has begun."""
        return Register(self.segment(f"intent of server {server}", _PAGE))

    def minutes(self) -> Register:
        """The persisted `LeaseTableState`."""
        return Register(self.segment("minutes", _PAGE))

    def journal(self) -> Journal:
        """What each of the last `JOURNAL_LENGTH` updates was, for hooks and logs.

        An entry is written before its update is committed: one beyond the committed ones is ignored and written again.
        """
        return Journal(self.segment("journal", JOURNAL_LENGTH * JOURNAL_ENTRY_BYTES))

    def set_version(self, server: int, version: int) -> None:
        self._clock.words()[server] = version

    def version(self, server: int) -> int:
        """The newest committed version of a server's shard."""
        number: int = self._clock.words()[server]
        return number

    def begin_update(self, server: int, number: int) -> None:
        """Noted before the update: a successor that does not find it committed knows that it may have begun."""
        self._begun.words()[server] = number

    def update_begun(self, server: int) -> int:
        number: int = self._begun.words()[server]
        return number

    @property
    def _begun(self) -> Segment:
        return self.segment("begun", _PAGE)

    @property
    def _clock(self) -> Segment:
        return self.segment("clock", _PAGE)

    def begin_filling(self, row: int, filling: int) -> None:
        """Written before the gradient: a server that has read another fill id here knows that the old one is gone."""
        self._fill_ids.words()[row] = filling

    def filling(self, row: int) -> int:
        number: int = self._fill_ids.words()[row]
        return number

    @property
    def _fill_ids(self) -> Segment:
        return self.segment("fillings", _pages(8 * self.num_rows))

    def _region(self, name: str) -> SharedCopy:
        if name not in self._regions:
            segment = self.segment(name, _pages(self.flat.num_bytes))
            self._regions[name] = SharedCopy(segment, self.flat.views(self.params, segment))
        return self._regions[name]


def _pages(num_bytes: int) -> int:
    return -(-max(num_bytes, 1) // _PAGE) * _PAGE
