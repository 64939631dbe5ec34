"""What workers and parameter servers of one host have in common: weights, states, gradients, and what was applied.

All of it is memory that the host's agent holds: it outlives whoever dies. Version n of the weights, which all steps to
n have made, lies in copy n of a ring; an update reads one version and writes the next, so whoever is killed in it
leaves the version before whole. What counts is the `Register`, written last. Gradients lie in rows, each with the
number of its filling. Start reading at `ServedMemory`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence

from torch import Tensor

from manyhands.comm.segments import Segment
from manyhands.parallel.common_weights import Kept
from manyhands.parallel.flat import Flat, lay_out

__all__ = ["Journal", "Memory", "Register", "ServedMemory"]

Memory = Callable[[str, int], Segment]
"""A region by name, the same for everybody who asks; `EnvironmentProblem` where there is no room."""

_HEADER = struct.Struct("<QII")
REGISTER_BYTES = 2**20


class Register:
    """A value that is the old or the new one, whenever its writer is killed; empty at first. One writer at a time."""

    def __init__(self, segment: Segment) -> None:
        self._segment, self._room = segment, segment.num_bytes // 2
        found = [_read(segment, at, self._room) for at in (0, self._room)]
        self._number, self.value = max((one for one in found if one is not None), default=(0, b""))

    def write(self, value: bytes) -> None:
        number = self._number + 1
        _write(self._segment, number % 2 * self._room, self._room, number, value)
        self._number, self.value = number, value


class Journal:
    """The last `length` of numbered entries, each of at most so many bytes."""

    def __init__(self, segment: Segment, length: int) -> None:
        self._segment, self._length, self._room = segment, length, segment.num_bytes // length

    def write(self, number: int, value: bytes) -> None:
        """Before what it tells of is committed: an entry beyond that counts for nothing, and is written again."""
        _write(self._segment, number % self._length * self._room, self._room, number, value)

    def read(self, number: int) -> bytes | None:
        found = _read(self._segment, number % self._length * self._room, self._room)
        return found[1] if found is not None and found[0] == number else None


def _write(segment: Segment, at: int, room: int, number: int, value: bytes) -> None:
    assert _HEADER.size + len(value) <= room, f"{len(value)} bytes do not fit"
    start = at + _HEADER.size
    segment.buffer[start : start + len(value)] = value
    _HEADER.pack_into(segment.buffer, at, number, len(value), zlib.crc32(value, number & 0xFFFFFFFF))


def _read(segment: Segment, at: int, room: int) -> tuple[int, bytes] | None:
    number, length, crc = _HEADER.unpack_from(segment.buffer, at)
    if number == 0 or length > room - _HEADER.size:
        return None
    value = bytes(segment.buffer[at + _HEADER.size : at + _HEADER.size + length])
    return (number, value) if zlib.crc32(value, number & 0xFFFFFFFF) == crc else None


class ServedMemory:
    """The memory of one layout of trained parameters. Regions are allotted when they are first looked at."""

    def __init__(self, params: Sequence[Tensor], memory: Memory, layout: str, *, copies: int, num_rows: int) -> None:
        self.flat: Flat = lay_out(params)
        self.params, self.copies, self.num_rows = list(params), copies, num_rows
        self._memory, self._layout = memory, layout
        self._regions: dict[str, Kept] = {}
        self._segments: dict[str, Segment] = {}

    def weights(self, version: int) -> Kept:
        return self._keep(f"weights {version % self.copies}")

    def states(self, name: str, version: int) -> Kept:
        """Two copies do: nobody but servers looks at them."""
        return self._keep(f"state {name} {version % 2}")

    def row(self, number: int) -> Kept:
        return self._keep(f"row {number}")

    def own(self, slot: int) -> Kept:
        """The weights of one worker, where each has versions of its own."""
        return self._keep(f"own weights {slot}")

    def segment(self, name: str, num_bytes: int) -> Segment:
        if name not in self._segments:
            self._segments[name] = self._memory(f"{self._layout}/{name}", num_bytes)
        return self._segments[name]

    def allot_all(self, *, states: Sequence[str], own: Sequence[int]) -> None:
        """Have it all now: where there is no room, nothing has begun yet."""
        for version in range(self.copies):
            self.weights(version)
        for name in states:
            self.states(name, 0), self.states(name, 1)
        for number in range(self.num_rows):
            self.row(number)
        for slot in own:
            self.own(slot)

    def begin_filling(self, row: int, filling: int) -> None:
        """Whoever had found another filling there knows now that it is gone."""
        struct.pack_into("<Q", self._fillings.buffer, 8 * row, filling)

    def filling(self, row: int) -> int:
        number: int = struct.unpack_from("<Q", self._fillings.buffer, 8 * row)[0]
        return number

    @property
    def _fillings(self) -> Segment:
        return self.segment("fillings", -(-8 * self.num_rows // 4096) * 4096)

    def _keep(self, name: str) -> Kept:
        if name not in self._regions:
            segment = self.segment(name, -(-self.flat.num_bytes // 4096) * 4096)
            self._regions[name] = Kept(segment, self.flat.views(self.params, segment))
        return self._regions[name]
