"""Values that ranks add up by writing each other letters in a codec: fp32 in, fp32 out, the same bits on every rank.

Each owner gets the others' contributions to its part, adds them along a tree over the ranks, and sends its sum to all.
Everyone, the owner too, uses what those bytes decode to: replicas never differ. With two ranks that takes as many bytes
as telling each other everything, which needs one trip instead of two: so they do that, and add what the same two
letters decode to. Start reading at `Letters.send`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.comm.axis import Axis
from manyhands.comm.codecs import Codec, aligned
from manyhands.parallel.gradients.slice_tree import finish

__all__ = ["Letters", "most_numel", "new_letters"]

# Before encoding: small enough that the first is under way early, and one is encoded while another travels.
LETTER_BYTES = 2**20


def most_numel(world: int, bucket_bytes: int) -> int:
    """How many values should travel together between so many ranks."""
    return min(bucket_bytes, (world if world > 2 else 1) * LETTER_BYTES) // 4


def new_letters(values: Tensor, residual: Tensor | None, tail_bytes: int, axis: Axis, codec: Codec) -> Letters:
    """For `values`, whose length the ranks divide evenly; `residual`, where the codec wants one, is as long."""
    return (Whole if axis.size == 2 else Divided)(values, residual, tail_bytes, axis, codec)


class Letters(ABC):
    """Values on their way to the others and, as a sum, back. In this order: the methods below.

    A letter to another rank is something of it, encoded, and `tail_bytes` that every rank gets alike.
    """

    def __init__(self, told_numel: int, tail_bytes: int, device: torch.device, axis: Axis, codec: Codec) -> None:
        """A letter tells `told_numel` values."""
        self._rank, self._world, self._codec, self._tail_bytes = axis.rank, axis.size, codec, tail_bytes
        self._device, self._coded_bytes = device, codec.num_bytes(told_numel)
        self._letter_bytes = aligned(self._coded_bytes + tail_bytes)
        self._outgoing = self._new_bytes(self._world - 1, self._letter_bytes)
        self._incoming = torch.empty_like(self._outgoing)
        self.num_bytes = self._outgoing.numel()

    def send(self, axis: Axis, name: str, senders: Sequence[int], tail: bytes) -> None:
        """A letter to each other rank, if this rank is among the `senders`."""
        self._senders, sends = senders, self._rank in senders
        if sends:
            for letter, rank in zip(self._outgoing, self._others(range(self._world)), strict=True):
                self._write(letter[: self._coded_bytes], rank)
                self._write_tail(letter, tail)
        heard = self._others(senders)
        self._pending = axis.all_to_all_start(
            self._incoming[: len(heard)].view(-1),
            (self._outgoing if sends else self._outgoing[:0]).view(-1),
            [self._letter_bytes if rank in heard else 0 for rank in range(self._world)],
            [self._letter_bytes if sends and rank != self._rank else 0 for rank in range(self._world)],
            name,
        )

    def receive(self) -> None:
        self._pending.wait()

    def tails(self) -> dict[int, bytes]:
        """Of each other sender, by rank; after `receive`."""
        place = slice(self._coded_bytes, self._coded_bytes + self._tail_bytes)
        return {rank: letter[place].cpu().numpy().tobytes() for rank, letter in self._letters().items()}

    @abstractmethod
    def send_sum(self, axis: Axis, name: str) -> None:
        """Add up what there is to add up here, and let the others know."""

    @abstractmethod
    def receive_sum(self) -> None:
        """Have the whole sum where this rank's contribution was."""

    @abstractmethod
    def _write(self, coded: Tensor, rank: int) -> None:
        """Encode what that rank is told."""

    def _write_tail(self, letter: Tensor, tail: bytes) -> None:
        if self._tail_bytes:
            letter[self._coded_bytes :][: len(tail)] = torch.frombuffer(bytearray(tail), dtype=torch.uint8)

    def _letters(self) -> dict[int, Tensor]:
        return dict(zip(self._others(self._senders), self._incoming, strict=False))

    def _others(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if rank != self._rank]

    def _new_bytes(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=self._device)


class Whole(Letters):
    """Two ranks tell each other everything; a + b is the same either way round."""

    def __init__(self, values: Tensor, residual: Tensor | None, tail_bytes: int, axis: Axis, codec: Codec) -> None:
        super().__init__(len(values), tail_bytes, values.device, axis, codec)
        self._values, self._residual = values, residual

    def _write(self, coded: Tensor, rank: int) -> None:
        self._codec.encode(self._values, coded, self._residual)

    def send_sum(self, axis: Axis, name: str) -> None:
        """Of what the other rank can know of this one's contribution, too: so replicas cannot differ."""
        mine = list(self._outgoing) if self._rank in self._senders else []
        for number, letter in enumerate([*mine, *self._letters().values()]):
            self._codec.decode(letter[: self._coded_bytes], self._values, add=number > 0)

    def receive_sum(self) -> None:
        """Both have made it."""


class Divided(Letters):
    """Each rank owns a part, and gets the others' contributions to it.

    `values` are this rank's contribution until it is sent, then the others' to its own part, then the sum.
    """

    def __init__(self, values: Tensor, residual: Tensor | None, tail_bytes: int, axis: Axis, codec: Codec) -> None:
        self._parts = values.view(axis.size, -1)
        super().__init__(self._parts.shape[1], tail_bytes, values.device, axis, codec)
        self._residuals = residual.view_as(self._parts) if residual is not None else [None] * self._world
        self._coded_sum = self._new_bytes(self._coded_bytes)
        self._coded_sums = self._new_bytes(self._world, self._coded_bytes)
        self.num_bytes += (self._world - 1) * self._coded_bytes

    def _write(self, coded: Tensor, rank: int) -> None:
        self._codec.encode(self._parts[rank], coded, self._residuals[rank])

    def receive(self) -> None:
        """The others' contributions to this rank's part, where the parts stood that they got."""
        super().receive()
        for rank, letter in self._letters().items():
            self._codec.decode(letter[: self._coded_bytes], self._parts[rank])

    def send_sum(self, axis: Axis, name: str) -> None:
        contributions = {(0, place): self._parts[rank] for place, rank in enumerate(self._senders)}
        total = finish(contributions, len(self._senders), add=lambda left, right: left.add_(right))
        self._codec.encode(total, self._coded_sum, self._residuals[self._rank])
        self._pending = axis.all_gather_start(self._coded_sums.view(-1), self._coded_sum, name)

    def receive_sum(self) -> None:
        """This rank's own part as well, from the bytes that all have: so replicas cannot differ."""
        self._pending.wait()
        for coded, part in zip(self._coded_sums, self._parts, strict=True):
            self._codec.decode(coded, part)
