"""Point-to-point messages between the ranks of an axis: tensors in lists, tuples and dicts, of sizes that the receiver
need not know.

A short value is one message, a long one two: the first contains the total length. Sending returns at once, so ranks
that send to each other cannot deadlock. Start reading at `PointToPoint`; `shared_memory_messages` is the same for
ranks of one host.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from manyhands.comm.axis import Axis, Pending
from manyhands.comm.tensor_messages import pack, unpack
from manyhands.comm.transport import Frame

__all__ = ["FollowingMessages", "Messages", "PointToPoint", "frames_of", "headed"]

FIRST_BYTES = 2**16
"""Most bytes of the first message. Gloo accepts a message shorter than the receive buffer."""


class Messages(Protocol):
    """Point-to-point messages between the ranks of an axis. Messages in flight between two ranks differ by tag."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def bytes_sent(self) -> int: ...

    def send(self, value: Any, to: int, tag: int, name: str) -> None:
        """Return at once; `value` may change afterwards."""

    def expect(self, source: int, tag: int, name: str) -> None:
        """Post a receive for a message that `receive` will read soon, so that it can arrive in the meantime."""

    def receive(self, source: int, tag: int, name: str) -> Any:
        """The next value that `source` sends with this tag, in new tensors."""

    def flush(self) -> None:
        """Wait until all sends are done."""

    def forget(self) -> None:
        """After an error: drop all pending sends and receives without waiting for them."""


class PointToPoint:
    """Sends and receives over the sockets of one axis."""

    def __init__(self, axis: Axis) -> None:
        self.axis, self.rank, self.size = axis, axis.rank, axis.size
        self._sends: list[tuple[Pending, Tensor]] = []
        self._receives: dict[tuple[int, int], tuple[Pending, Tensor]] = {}
        self.bytes_sent = 0

    def send(self, value: Any, to: int, tag: int, name: str) -> None:
        data = _joined(headed(pack(value, name)))
        self.bytes_sent += len(data)
        self._sends = [one for one in self._sends if not one[0].done]
        for part, number in ((data[:FIRST_BYTES], 2 * tag), (data[FIRST_BYTES:], 2 * tag + 1)):
            if len(part):
                self._sends.append((self.axis.send_start(part, to, number, name), data))

    def expect(self, source: int, tag: int, name: str) -> None:
        """Post the receive of the next message's first part, so that it can arrive in the meantime."""
        first = torch.empty(FIRST_BYTES, dtype=torch.uint8)
        self._receives[source, tag] = self.axis.receive_start(first, source, 2 * tag, name), first

    def receive(self, source: int, tag: int, name: str) -> Any:
        """The next value that `source` sends with this tag, in new tensors."""
        if (source, tag) not in self._receives:
            self.expect(source, tag, name)
        receiving, first = self._receives.pop((source, tag))
        receiving.wait()
        (length,) = struct.unpack("<q", first[:8].numpy().tobytes())
        data = first[:length]
        if length > FIRST_BYTES:
            data = torch.empty(length, dtype=torch.uint8)
            pending = self.axis.receive_start(data[FIRST_BYTES:], source, 2 * tag + 1, name)
            data[:FIRST_BYTES] = first
            pending.wait()
        return unpack(frames_of(data.numpy().data))

    def flush(self) -> None:
        """Wait until all sends are done."""
        sends, self._sends = self._sends, []
        for pending, _ in sends:
            pending.wait()

    def forget(self) -> None:
        self._sends, self._receives = [], {}


class FollowingMessages:
    """Forwards to the `Messages` that `find` returns at the time, for objects that outlive a generation (as
    `Following` does for an axis)."""

    def __init__(self, find: Callable[[], Messages]) -> None:
        first = find()
        self._find, self.rank, self.size = find, first.rank, first.size

    @property
    def bytes_sent(self) -> int:
        """Bytes sent in this generation."""
        return self._find().bytes_sent

    def send(self, value: Any, to: int, tag: int, name: str) -> None:
        self._find().send(value, to, tag, name)

    def expect(self, source: int, tag: int, name: str) -> None:
        self._find().expect(source, tag, name)

    def receive(self, source: int, tag: int, name: str) -> Any:
        return self._find().receive(source, tag, name)

    def flush(self) -> None:
        self._find().flush()

    def forget(self) -> None:
        self._find().forget()


def headed(frames: Sequence[Frame]) -> list[Frame]:
    """Frames with a header before them: the total length, the number of frames and the length of each."""
    lengths = [len(frame) for frame in frames]
    header = struct.pack(f"<{2 + len(lengths)}q", 8 * (2 + len(lengths)) + sum(lengths), len(lengths), *lengths)
    return [header, *frames]


def _joined(frames: Sequence[Frame]) -> Tensor:
    data = torch.empty(sum(map(len, frames)), dtype=torch.uint8)
    view, start = data.numpy().data, 0
    for frame in frames:
        view[start : start + len(frame)] = frame
        start += len(frame)
    return data


def frames_of(view: memoryview) -> list[Frame]:
    """The frames after a header."""
    (count,) = struct.unpack_from("<q", view, 8)
    lengths = struct.unpack_from(f"<{count}q", view, 16)
    frames: list[Frame] = []
    start = 16 + 8 * count
    for length in lengths:
        frames.append(view[start : start + length])
        start += length
    return frames
