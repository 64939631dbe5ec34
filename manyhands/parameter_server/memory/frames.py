"""Stretches of memory as streams of bytes that travel in frames, and how one such stream gets across. Pure.

Between hosts there is no memory in common, so worker and server each have the same regions, and what the one writes is
brought to the other. A `Stream` is what of these regions belongs to one server, in an order that both know. `Sending`
and `Fetching` are one end of its way: at most `WINDOW` frames are under way, and what is not answered is said again.
No sockets, no clock. Start reading at `Stream`.
"""

from __future__ import annotations

import bisect
import struct
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from manyhands.comm.host_memory import HostMemory, Segment

__all__ = ["FRAME_BYTES", "WINDOW", "Fetching", "Sending", "Span", "Stream", "checksum", "own_segment"]

FRAME_BYTES = 2**18
"""At most so many in a frame; whole cache lines, so that no element is cut in two."""
WINDOW = 16
_PLACE = struct.Struct("<QQ")
_MASK = 2**64 - 1


class Span(NamedTuple):
    segment: Segment
    start: int
    num_bytes: int


class Stream:
    """Spans one after the other."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = [span for span in spans if span.num_bytes]
        self._starts = [0, *accumulate(span.num_bytes for span in self._spans)]

    @property
    def num_bytes(self) -> int:
        return self._starts[-1]

    def has(self, offset: int, num_bytes: int) -> bool:
        """Whether this is a frame of it."""
        return offset >= 0 and 0 < num_bytes <= FRAME_BYTES and offset + num_bytes <= self.num_bytes

    def read(self, offset: int, num_bytes: int) -> bytes:
        return b"".join(segment.buffer[at : at + length] for segment, at, length in self._cut(offset, num_bytes))

    def write(self, offset: int, data: bytes) -> None:
        done = 0
        for segment, at, length in self._cut(offset, len(data)):
            segment.buffer[at : at + length] = data[done : done + length]
            done += length

    def _cut(self, offset: int, num_bytes: int) -> Iterator[Span]:
        number = bisect.bisect_right(self._starts, offset) - 1
        while num_bytes > 0:
            segment, start, length = self._spans[number]
            within = offset - self._starts[number]
            take = min(num_bytes, length - within)
            yield Span(segment, start + within, take)
            offset, num_bytes, number = offset + take, num_bytes - take, number + 1


def own_segment(num_bytes: int) -> Segment:
    """Memory of this process; `EnvironmentProblem` where there is no room."""
    memory = HostMemory()
    try:
        return Segment(memory.fd, num_bytes, memory.allot("own", num_bytes))
    finally:
        memory.close()


def checksum(what: int, offset: int, data: bytes) -> int:
    """Of a frame and of where it belongs."""
    return zlib.crc32(data, zlib.crc32(_PLACE.pack(what & _MASK, offset & _MASK)))


class Sending:
    """The sender's end of a stream that is taken in order: the other end says how many bytes it has."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes, self._sent, self._received = num_bytes, 0, 0

    @property
    def is_done(self) -> bool:
        return self._received >= self._num_bytes

    def due(self) -> list[tuple[int, int]]:
        """Offsets and lengths of frames to send now."""
        frames = []
        while self._sent < min(self._num_bytes, self._received + WINDOW * FRAME_BYTES):
            length = min(FRAME_BYTES, self._num_bytes - self._sent)
            frames.append((self._sent, length))
            self._sent += length
        return frames

    def hear(self, received: int) -> None:
        """All bytes to this one are there. Fewer than before: whoever had them is gone, or this word is old."""
        self._received = received
        self._sent = max(self._sent, received)

    def again(self) -> None:
        """Nothing was heard for a while."""
        self._sent = self._received


class Fetching:
    """The asking end of a stream that is told frame by frame; how long it is, the first answer tells."""

    def __init__(self) -> None:
        self._num_bytes: int | None = None
        self._todo, self._asked = deque([0]), set[int]()

    @property
    def is_done(self) -> bool:
        return self._num_bytes is not None and not self._todo and not self._asked

    def due(self) -> list[int]:
        """Offsets to ask for now."""
        offsets = [self._todo.popleft() for _ in range(min(WINDOW - len(self._asked), len(self._todo)))]
        self._asked.update(offsets)
        return offsets

    def hear(self, offset: int, num_bytes: int) -> bool:
        """The frame at `offset` of a stream of so many bytes is here; False: it is not one that is waited for."""
        if offset not in self._asked or num_bytes != (self._num_bytes or num_bytes):
            return False
        if self._num_bytes is None:
            self._num_bytes = num_bytes
            self._todo.extend(range(FRAME_BYTES, num_bytes, FRAME_BYTES))
        self._asked.discard(offset)
        return True

    def again(self) -> None:
        """Nothing was heard for a while."""
        self._todo.extendleft(sorted(self._asked, reverse=True))
        self._asked = set()
