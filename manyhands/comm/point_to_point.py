"""Values from rank to rank of an axis: tensors in lists, tuples and dicts, whose sizes the receiver need not know.

A short value is one message, a long one two: the first says how long it is in all. Sending returns at once, so ranks
that send to each other never wait for each other in a circle. Start reading at `Values`; `shared_memory_messages` has
the same for ranks of one host.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from manyhands.comm.axis import Axis, Pending
from manyhands.comm.tensor_messages import Frame, pack, unpack

__all__ = ["FollowingMessages", "Messages", "Values", "frames_of", "headed"]

FIRST_BYTES = 2**16
"""Of the first message, at most. Gloo takes less than a receiver is ready for."""


class Messages(Protocol):
    """What ranks of a line send each other. Tags tell apart what is under way between the same two ranks."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def bytes_sent(self) -> int: ...

    def send(self, value: Any, to: int, tag: int, name: str) -> None:
        """Returns at once; what is sent may change afterwards."""

    def expect(self, source: int, tag: int, name: str) -> None:
        """Be ready for what will be received soon, so that it can arrive in the meantime."""

    def receive(self, source: int, tag: int, name: str) -> Any:
        """What `source` sends with this tag, in tensors of its own."""

    def flush(self) -> None:
        """Wait until all that was sent has gone."""

    def forget(self) -> None:
        """After an error: nothing of what was under way is waited for any more."""


class Values:
    """Sends and receives over the sockets of one axis."""

    def __init__(self, axis: Axis) -> None:
        self.axis, self.rank, self.size = axis, axis.rank, axis.size
        self._going: list[tuple[Pending, Tensor]] = []
        self._coming: dict[tuple[int, int], tuple[Pending, Tensor]] = {}
        self.bytes_sent = 0

    def send(self, value: Any, to: int, tag: int, name: str) -> None:
        data = _joined(headed(pack(value, name)))
        self.bytes_sent += len(data)
        self._going = [one for one in self._going if not one[0].done]
        for part, number in ((data[:FIRST_BYTES], 2 * tag), (data[FIRST_BYTES:], 2 * tag + 1)):
            if len(part):
                self._going.append((self.axis.send_start(part, to, number, name), data))

    def expect(self, source: int, tag: int, name: str) -> None:
        """Be ready for what will be received next, so that its first part can arrive in the meantime."""
        first = torch.empty(FIRST_BYTES, dtype=torch.uint8)
        self._coming[source, tag] = self.axis.receive_start(first, source, 2 * tag, name), first

    def receive(self, source: int, tag: int, name: str) -> Any:
        """What `source` sends with this tag, in tensors of its own."""
        if (source, tag) not in self._coming:
            self.expect(source, tag, name)
        coming, first = self._coming.pop((source, tag))
        coming.wait()
        (length,) = struct.unpack("<q", first[:8].numpy().tobytes())
        data = first[:length]
        if length > FIRST_BYTES:
            data = torch.empty(length, dtype=torch.uint8)
            pending = self.axis.receive_start(data[FIRST_BYTES:], source, 2 * tag + 1, name)
            data[:FIRST_BYTES] = first
            pending.wait()
        return unpack(frames_of(data.numpy().data))

    def flush(self) -> None:
        """Wait until all that was sent has gone."""
        going, self._going = self._going, []
        for pending, _ in going:
            pending.wait()

    def forget(self) -> None:
        self._going, self._coming = [], {}


class FollowingMessages:
    """Whatever way `find` gives at the time, for those who outlive a generation, as `Following` is for an axis."""

    def __init__(self, find: Callable[[], Messages]) -> None:
        first = find()
        self._find, self.rank, self.size = find, first.rank, first.size

    @property
    def bytes_sent(self) -> int:
        """In this generation."""
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
    """Behind what says where they are: the length of all, the number of frames and their lengths."""
    lengths = [len(frame) for frame in frames]
    head = struct.pack(f"<{2 + len(lengths)}q", 8 * (2 + len(lengths)) + sum(lengths), len(lengths), *lengths)
    return [head, *frames]


def _joined(frames: Sequence[Frame]) -> Tensor:
    data = torch.empty(sum(map(len, frames)), dtype=torch.uint8)
    view, start = data.numpy().data, 0
    for frame in frames:
        view[start : start + len(frame)] = frame
        start += len(frame)
    return data


def frames_of(view: memoryview) -> list[Frame]:
    """The frames behind a head."""
    (count,) = struct.unpack_from("<q", view, 8)
    lengths = struct.unpack_from(f"<{count}q", view, 16)
    frames: list[Frame] = []
    start = 16 + 8 * count
    for length in lengths:
        frames.append(view[start : start + length])
        start += length
    return frames
