"""Point-to-point messages between ranks of one host through shared memory (`comm.point_to_point` is the same over
sockets).

For every ordered pair of ranks there is a ring: a table of messages and the space for them; the sender adds messages,
the receiver removes them. If a message does not fit, the sender switches to a larger ring, so sending never waits.
`ring_buffer` allocates the space; the counters of messages sent and received are those of a `Plane`. Start reading at
`SharedMemoryPointToPoint`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from manyhands.comm.handed_over import count_handed_over
from manyhands.comm.host_memory import Segment
from manyhands.comm.point_to_point import Messages, frames_of, headed
from manyhands.comm.ring_buffer import RingBuffer
from manyhands.comm.shared_memory import Plane
from manyhands.comm.tensor_messages import pack, unpack
from manyhands.comm.transport import Frame

__all__ = ["MixedPointToPoint", "SharedMemoryPointToPoint"]

FIRST_BYTES = 2**22
"""Size of the first ring. A ring that fits in the caches is faster than a larger one."""
ENTRIES = 512
"""Entries of the table: the messages in flight, and one that announces the next ring."""
MOVED = 2**64 - 1
"""Tag of the entry that announces the next ring."""

AREA_BYTES = 128  # the smallest area of a plane; it is not used
ENTRY_WORDS = 3  # tag, begin, length
SENDER, RECEIVER = 0, 1


class SharedMemoryPointToPoint:
    """Rank `rank` of an axis whose ranks in the run are `ranks`; `memory` returns a region, the same one for both ends.

    A rank that is lost, or does not send in time, ends the wait as in every `Plane`.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        memory: Callable[[str, int], Segment],
        *,
        timeout_s: float = 30.0,
        here: Sequence[int] | None = None,
        missing: Callable[[], str] = lambda: "",
        first_bytes: int = FIRST_BYTES,
    ) -> None:
        """`here`: the run's ranks on this host; `missing`: as in `Plane`."""
        self.rank, self.size, self._ranks, self._memory = rank, len(ranks), list(ranks), memory
        self._settings: dict[str, Any] = {"timeout_s": timeout_s, "here": here, "missing": missing}
        self._first_bytes = first_bytes
        self._outboxes: dict[int, _Outbox] = {}
        self._inboxes: dict[int, _Inbox] = {}
        self.bytes_sent = 0

    def send(self, value: Any, to: int, tag: int, name: str) -> None:
        pieces = headed(pack(value, name))
        if to not in self._outboxes:
            self._outboxes[to] = _Outbox(self._opener(self.rank, to), self._first_bytes)
        self._outboxes[to].put(tag, pieces)
        num_bytes = sum(map(len, pieces))
        self.bytes_sent += num_bytes
        count_handed_over(num_bytes)

    def expect(self, source: int, tag: int, name: str) -> None:
        """Nothing to post: a message is in shared memory once it was sent."""

    def receive(self, source: int, tag: int, name: str) -> Any:
        """The next value that `source` sends with this tag, in new tensors."""
        if source not in self._inboxes:
            self._inboxes[source] = _Inbox(self._opener(source, self.rank), self._first_bytes)
        return self._inboxes[source].take(tag, name)

    def flush(self) -> None:
        """Nothing to wait for: sends are done when they return."""

    def forget(self) -> None:
        """Nothing to drop: rings belong to one generation and end with it."""

    def _opener(self, source: int, to: int) -> Callable[[int, int], _Ring]:
        """A function that opens a ring between these two ranks, given its number and size."""
        ranks = [self._ranks[source], self._ranks[to]]
        end = SENDER if source == self.rank else RECEIVER

        def open_ring(number: int, num_bytes: int) -> _Ring:
            segment = self._memory(f"from {ranks[0]} to {ranks[1]}, ring {number}", _Ring.head_bytes() + num_bytes)
            return _Ring(segment, Plane(segment, end, 2, area_bytes=AREA_BYTES, ranks=ranks, **self._settings))

        return open_ring


class _Ring:
    """One end of a ring. The sender posts once per message added, the receiver once per message removed."""

    def __init__(self, segment: Segment, plane: Plane) -> None:
        self.segment, self.plane = segment, plane
        begin = Plane.num_bytes(2, AREA_BYTES) // 8
        self._table = segment.words()[begin : begin + ENTRIES * ENTRY_WORDS]
        self.room = memoryview(segment.buffer)[self.head_bytes() :]

    @staticmethod
    def head_bytes() -> int:
        return Plane.num_bytes(2, AREA_BYTES) + ENTRIES * ENTRY_WORDS * 8

    @property
    def next_entry(self) -> memoryview:
        """The table entry of the next message of this end."""
        begin = self.plane.num_posts % ENTRIES * ENTRY_WORDS
        return self._table[begin : begin + ENTRY_WORDS]

    def write_entry(self, tag: int, begin: int, length: int) -> None:
        entry = self.next_entry
        entry[0], entry[1], entry[2] = tag, begin, length
        self.plane.post()

    def close(self) -> None:
        self._table.release()
        self.room.release()
        self.segment.close()


class _Outbox:
    """The sender's end of the rings to one rank."""

    def __init__(self, open_ring: Callable[[int, int], _Ring], num_bytes: int) -> None:
        self._open, self._number = open_ring, -1
        self._enter(num_bytes)

    def _enter(self, num_bytes: int) -> None:
        self._number, self._num_bytes, self._taken = self._number + 1, num_bytes, 0
        self._ring, self._room = self._open(self._number, num_bytes), RingBuffer(num_bytes, ENTRIES - 1)

    def put(self, tag: int, pieces: Sequence[Frame]) -> None:
        length = sum(map(len, pieces))
        self._free_taken()
        begin = self._room.put(length)
        if begin is None:
            self._switch_ring(length)
            begin = self._room.put(length)
        assert begin is not None
        at = begin
        for piece in pieces:
            self._ring.room[at : at + len(piece)] = piece
            at += len(piece)
        self._ring.write_entry(tag, begin, length)

    def _free_taken(self) -> None:
        """Free the space of the messages that the receiver has removed."""
        before = self._taken
        while self._taken < self._ring.plane.num_posts and self._ring.plane.all_posted(self._taken + 1):
            self._taken += 1
        self._room.take(self._taken - before)

    def _switch_ring(self, length: int) -> None:
        """Switch to a ring of at least twice the size; the receiver follows when it reads the `MOVED` entry."""
        before = self._ring
        num_bytes = max(2 * self._num_bytes, 1 << (4 * length).bit_length())
        self._enter(num_bytes)
        before.write_entry(MOVED, 0, num_bytes)
        before.close()


class _Inbox:
    """The receiver's end of the rings from one rank."""

    def __init__(self, open_ring: Callable[[int, int], _Ring], num_bytes: int) -> None:
        self._open, self._number = open_ring, 0
        self._ring = open_ring(0, num_bytes)
        self._early: defaultdict[int, deque[Any]] = defaultdict(deque)
        """Messages that arrived before `take` was called for their tag."""

    def take(self, tag: int, name: str) -> Any:
        while not self._early[tag]:
            self._take_next(name)
        value = self._early[tag].popleft()
        if not self._early[tag]:
            del self._early[tag]
        return value

    def _take_next(self, name: str) -> None:
        ring = self._ring
        ring.plane.wait_posted(ring.plane.num_posts + 1, name)
        tag, begin, length = ring.next_entry
        if tag == MOVED:
            self._number += 1
            self._ring = self._open(self._number, length)
            ring.segment.free()  # the sender has left it
            ring.close()
            return
        self._early[tag].append(unpack(frames_of(ring.room[begin : begin + length])))
        ring.plane.post()


class MixedPointToPoint:
    """Uses shared memory for the ranks `near` (on this host), sockets for all others."""

    def __init__(self, shared: Messages, far: Messages, near: Collection[int]) -> None:
        self.rank, self.size = far.rank, far.size
        self._channels = [shared if rank in near else far for rank in range(far.size)]
        self._both = (shared, far)

    @property
    def bytes_sent(self) -> int:
        return sum(channel.bytes_sent for channel in self._both)

    def send(self, value: Any, to: int, tag: int, name: str) -> None:
        self._channels[to].send(value, to, tag, name)

    def expect(self, source: int, tag: int, name: str) -> None:
        self._channels[source].expect(source, tag, name)

    def receive(self, source: int, tag: int, name: str) -> Any:
        return self._channels[source].receive(source, tag, name)

    def flush(self) -> None:
        for channel in self._both:
            channel.flush()

    def forget(self) -> None:
        for channel in self._both:
            channel.forget()
