"""A note for every seat of a step, in shared memory: what its rows hold, a message that comes along, and a stamp.

The stamp is written last. So a seat that has the step's stamp is complete, and one whose rank was killed before is not.
Start reading at `SeatNotes.write`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from manyhands.comm.host_memory import Segment

__all__ = ["SeatNotes", "stamp_of"]

STAMP_BYTES = 16


def stamp_of(generation: str, step: int, redone: int) -> bytes:
    """What marks gradients of this step, divided as this group of ranks does, done for the so many-th time."""
    return hashlib.blake2s(f"{generation} {step} {redone}".encode(), digest_size=STAMP_BYTES).digest()


class SeatNotes:
    """For rows of `num_params` gradients each. In a step: `begin`, `make_room`, `write`; and, after a meeting, read."""

    def __init__(self, num_params: int, memory: Callable[[str, int], Segment]) -> None:
        self.stamp = bytes(STAMP_BYTES)
        """What a seat carries when it is complete; where ranks may be lost, no other step of the run has it."""
        self._num_params, self._memory, self._room = num_params, memory, 0

    def begin(self) -> None:
        self._room = 0

    @property
    def has_room(self) -> bool:
        """Whether it was made in this step."""
        return self._room > 0

    def make_room(self, slots: Sequence[int], num_rows: int, message_bytes: int) -> None:
        """For a seat of each slot, with so many rows and a message of so many bytes at most."""
        self._present_bytes = num_rows * self._num_params
        needed = STAMP_BYTES + self._present_bytes + message_bytes
        # From what is needed alone: whoever comes later finds the same memory.
        self._room = max(4096, 1 << (needed - 1).bit_length())
        self._notes = [self._memory(f"messages of {self._room} of slot {slot}", self._room).buffer for slot in slots]

    def write(self, seat: int, rows: Sequence[Sequence[bool]], message: bytes) -> None:
        """Which parameters have a gradient in each of the seat's rows, and its message."""
        data = b"".join(map(bytes, rows)).ljust(self._present_bytes, b"\0") + message
        note = self._notes[seat]
        note[STAMP_BYTES : STAMP_BYTES + len(data)] = data
        note[:STAMP_BYTES] = self.stamp  # last: a worker that is killed before leaves an incomplete seat

    def is_complete(self, seat: int) -> bool:
        return self.has_room and self._notes[seat][:STAMP_BYTES] == self.stamp

    def messages(self) -> list[bytes]:
        """Of every seat, followed by zeros."""
        start = STAMP_BYTES + self._present_bytes
        return [note[start : self._room] for note in self._notes]

    def present(self, num_rows: Sequence[int]) -> list[int]:
        """Parameters that have a gradient in some row, where seat s has written `num_rows[s]`."""
        num_params, everyone = self._num_params, [False] * self._num_params
        for note, rows in zip(self._notes, num_rows, strict=True):
            for row in range(rows):
                start = STAMP_BYTES + row * num_params
                flags = note[start : start + num_params]
                if flags.count(1) == num_params:
                    return list(range(num_params))
                everyone = [a or bool(b) for a, b in zip(everyone, flags, strict=True)]
        return [i for i, there in enumerate(everyone) if there]
