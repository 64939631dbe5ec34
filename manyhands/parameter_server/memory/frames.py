"""Ranges of memory as byte streams in frames, and the flow control of one such stream. Pure.

Hosts share no memory, so worker and server have the same regions each, and what one writes is sent to the other. A
`SpanStream` is the part of these regions that belongs to one server, in an order that both know. `Sending` and
`Fetching` are the two kinds of ends: at most `WINDOW` frames are in flight, and what is not answered is sent again. No
sockets, no clock. Start reading at `SpanStream`.
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

__all__ = ["FRAME_BYTES", "WINDOW", "Fetching", "FrameSpan", "Sending", "SpanStream", "checksum", "own_segment"]

FRAME_BYTES = 2**18
"""Maximum bytes of a frame; whole cache lines, so that no element is split."""
WINDOW = 16
_POSITION = struct.Struct("<QQ")
_MASK = 2**64 - 1


class FrameSpan(NamedTuple):
    segment: Segment
    start: int
    num_bytes: int


class SpanStream:
    """Consecutive spans as one stream."""

    def __init__(self, spans: Sequence[FrameSpan]) -> None:
        self._spans = [span for span in spans if span.num_bytes]
        self._starts = [0, *accumulate(span.num_bytes for span in self._spans)]

    @property
    def num_bytes(self) -> int:
        return self._starts[-1]

    def has(self, offset: int, num_bytes: int) -> bool:
        """Whether this is a valid frame of the stream."""
        return offset >= 0 and 0 < num_bytes <= FRAME_BYTES and offset + num_bytes <= self.num_bytes

    def read(self, offset: int, num_bytes: int) -> bytes:
        return b"".join(segment.buffer[at : at + length] for segment, at, length in self._cut(offset, num_bytes))

    def write(self, offset: int, data: bytes) -> None:
        done = 0
        for segment, at, length in self._cut(offset, len(data)):
            segment.buffer[at : at + length] = data[done : done + length]
            done += length

    def _cut(self, offset: int, num_bytes: int) -> Iterator[FrameSpan]:
        number = bisect.bisect_right(self._starts, offset) - 1
        while num_bytes > 0:
            segment, start, length = self._spans[number]
            within = offset - self._starts[number]
            take = min(num_bytes, length - within)
            yield FrameSpan(segment, start + within, take)
            offset, num_bytes, number = offset + take, num_bytes - take, number + 1


def own_segment(num_bytes: int) -> Segment:
    """Memory of this process only; `EnvironmentProblem` where there is no room."""
    memory = HostMemory()
    try:
        return Segment(memory.fd, num_bytes, memory.allot("own", num_bytes))
    finally:
        memory.close()


def checksum(what: int, offset: int, data: bytes) -> int:
    """Of a frame and of its position."""
    return zlib.crc32(data, zlib.crc32(_POSITION.pack(what & _MASK, offset & _MASK)))


class Sending:
    """The sending end of a stream that is received in order: the receiver reports how many bytes it has."""

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
        """All bytes up to this one have arrived. Fewer than before: the receiver was replaced, or the report is old."""
        self._received = received
        self._sent = max(self._sent, received)

    def again(self) -> None:
        """No answer for a while: send again what is not confirmed."""
        self._sent = self._received


class Fetching:
    """The requesting end of a stream whose frames arrive in any order; the first answer says how long it is."""

    def __init__(self) -> None:
        self._num_bytes: int | None = None
        self._todo, self._asked = deque([0]), set[int]()

    @property
    def is_done(self) -> bool:
        return self._num_bytes is not None and not self._todo and not self._asked

    def due(self) -> list[int]:
        """Offsets to request now."""
        offsets = [self._todo.popleft() for _ in range(min(WINDOW - len(self._asked), len(self._todo)))]
        self._asked.update(offsets)
        return offsets

    def hear(self, offset: int, num_bytes: int) -> bool:
        """The frame at `offset` of a stream of `num_bytes` has arrived; False: it was not requested."""
        if offset not in self._asked or num_bytes != (self._num_bytes or num_bytes):
            return False
        if self._num_bytes is None:
            self._num_bytes = num_bytes
            self._todo.extend(range(FRAME_BYTES, num_bytes, FRAME_BYTES))
        self._asked.discard(offset)
        return True

    def again(self) -> None:
        """No answer for a while: request again what is missing."""
        self._todo.extendleft(sorted(self._asked, reverse=True))
        self._asked = set()
