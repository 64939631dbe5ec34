"""Values in shared memory that stay whole if the process that writes them is killed.

Every value has a number and a checksum, so that one whose writing was not completed is recognized. Imports no torch.
Start reading at `Register`.
"""

from __future__ import annotations

import struct
import zlib

from manyhands.comm.host_memory import Segment

__all__ = ["JOURNAL_ENTRY_BYTES", "Journal", "Register"]

JOURNAL_ENTRY_BYTES = 256
_HEADER = struct.Struct("<QII")


class Register:
    """A value that stays either old or new if its writer is killed; empty at first. One writer at a time."""

    def __init__(self, segment: Segment) -> None:
        self.segment, self._room = segment, segment.num_bytes // 2
        self._number, self.value = self._newest()

    @property
    def most_bytes(self) -> int:
        return self._room - _HEADER.size

    def read(self) -> bytes:
        """The current value, from any writer."""
        self._number, self.value = self._newest()
        return self.value

    def write(self, value: bytes) -> None:
        number = self._number + 1
        _write(self.segment, number % 2 * self._room, self._room, number, value)
        self._number, self.value = number, value

    def _newest(self) -> tuple[int, bytes]:
        found = [_read(self.segment, at, self._room) for at in (0, self._room)]
        return max((one for one in found if one is not None), default=(0, b""))


class Journal:
    """The last of numbered entries, as many as fit into the segment with `JOURNAL_ENTRY_BYTES` for each."""

    def __init__(self, segment: Segment) -> None:
        self._segment, self._length = segment, segment.num_bytes // JOURNAL_ENTRY_BYTES

    def write(self, number: int, value: bytes) -> None:
        """An entry that is there already is replaced."""
        _write(self._segment, self._start(number), JOURNAL_ENTRY_BYTES, number, value)

    def read(self, number: int) -> bytes | None:
        found = _read(self._segment, self._start(number), JOURNAL_ENTRY_BYTES)
        return found[1] if found is not None and found[0] == number else None

    def _start(self, number: int) -> int:
        return number % self._length * JOURNAL_ENTRY_BYTES


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
