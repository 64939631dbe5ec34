"""The gradient sum in fewer bytes: what ranks send each other goes through a codec, fp32 in, fp32 out.

A rank adds up its own slices, and sends each owner its part of that, encoded. An owner decodes, adds along a tree over
the ranks, and sends its sum, encoded, to all. Everyone, the owner too, uses what those bytes decode to: replicas never
differ. With two ranks that takes as many bytes as telling each other everything, which needs one trip instead of two:
so they do that, and add what the same two letters decode to. What is given up is that the sum is the same for every
number of ranks. Which parameters had a gradient, and the bytes of `carry`, travel beside as they are.

Where the codec feeds back, a rank keeps one number per value of the gradient: in the part that it owns, what its sums
have not told; elsewhere, and everywhere with two ranks, what it has not told the others. Both are in the unit of the
sum, so wherever such a residual ends up after a change of ranks or buckets, adding it to what is sent next makes up for
it. The sum of all ranks' residuals is what the weights have not seen yet. Start reading at `CodedBucket.start`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from manyhands.comm.axis import Axis
from manyhands.comm.codecs import Codec, aligned
from manyhands.parallel.gradients import Bucket, Gradients, GradientSum, copy_gradients_
from manyhands.parallel.tree import Node, finish

__all__ = ["CodedGradientSum"]

# Before encoding. At 1 Gbit/s a step took a tenth less than with 4 MB; half of it, or more of them at a time, gained
# nothing more.
LETTER_BYTES = 2**20


class CodedGradientSum(GradientSum):
    """A `GradientSum` whose fp32 gradients travel encoded; those of other dtypes travel as they are."""

    def __init__(self, params: Sequence[nn.Parameter], axis: Axis, bucket_bytes: int, codec: Codec) -> None:
        self._codec = codec
        if axis.size > 2:
            # Sums are sent back while backward still runs: on a slow link both directions of a bucket hide behind it.
            self.most_under_way = 2
        self._owed: dict[int, Tensor] = {}  # on one rank, which has no buckets, until the next gradient comes
        super().__init__(params, axis, bucket_bytes)

    @property
    def order(self) -> list[int] | None:
        """The order that the buckets settled on: with it, another object rounds as this one does."""
        return [index for bucket in self._buckets for index in bucket.indices] if self._settled else None

    def residuals(self) -> dict[int, Tensor]:
        """This rank's, by the parameter's place in `params`; they change with the next step."""
        coded = {
            index: view
            for bucket in self._coded_buckets()
            for index, view in zip(bucket.indices, bucket.residuals, strict=False)
        }
        return {**self._owed, **coded}

    def gather_residuals(self) -> dict[int, Tensor]:
        """On rank 0 every rank's residuals by parameter, a row for each rank; nothing on the others. A collective."""
        if self._axis.size == 1:
            return {index: owed.unsqueeze(0) for index, owed in self._owed.items()}
        gathered: dict[int, Tensor] = {}
        for number, bucket in enumerate(self._coded_buckets()):
            gathered |= bucket.gather_residuals(self._axis, f"residuals of bucket {number}")
        return gathered

    def restore(self, order: Sequence[int] | None, rows: Mapping[int, Tensor]) -> None:
        """Go on from what `order` and `gather_residuals` were. Of n ranks, rank r owes rows r, r + n, ..."""
        if order is not None and self._axis.size > 1:
            self._settled = True
            self._use_order(order)
        rank, size = self._axis.rank, self._axis.size
        self._owe({index: values[rank::size].sum(0) for index, values in rows.items()})

    def succeed(self, before: CodedGradientSum) -> None:
        """Owe what `before` owes to parameters of both, in its order if they are the same ones."""
        place = {id(param): index for index, param in enumerate(self.params)}
        moved = [place.get(id(param)) for param in before.params]
        order = None
        if before.order is not None and None not in moved and len(moved) == len(self.params):
            order = [place[id(before.params[index])] for index in before.order]
        if order is not None:
            self._settled = True
            self._use_order(order)
        owed = before.residuals()
        self._owe({new: owed[index] for index, new in enumerate(moved) if new is not None and index in owed})

    def scale_residuals(self, factor: float) -> None:
        """Gradients are `factor` times as large from now on."""
        for residual in self.residuals().values():
            residual.mul_(factor)

    def finish(self) -> None:
        super().finish()
        for index in list(self._owed):
            grad = self.params[index].grad
            if grad is not None:
                self.params[index].grad = self._owed.pop(index) + grad

    def _coded_buckets(self) -> list[CodedBucket]:
        return [bucket for bucket in self._buckets if isinstance(bucket, CodedBucket)]

    def _make_buckets(self, order: Sequence[int]) -> None:
        owed = self.residuals()
        super()._make_buckets(order)
        self._owe(owed)

    def _owe(self, owed: Mapping[int, Tensor]) -> None:
        if self._axis.size == 1:
            self._owed = {index: values.clone() for index, values in owed.items()}
            return
        mine = self.residuals()
        for index, values in owed.items():
            mine[index].copy_(values)

    def _new_bucket(self, params: Sequence[nn.Parameter], indices: Sequence[int], room: int) -> Bucket:
        if params[0].dtype != torch.float32:
            return super()._new_bucket(params, indices, room)
        letters = self._axis.size if self._axis.size > 2 else 1
        piece_bytes = min(self._bucket_bytes, letters * LETTER_BYTES)
        return CodedBucket(params, indices, self._axis, room, self._codec, piece_bytes // 4)


class CodedBucket(Bucket):
    """The gradients in one flat row, which travels in pieces of at most `piece_numel` values.

    A parameter may be larger than a bucket should be: in pieces, one is encoded while another travels.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        indices: Sequence[int],
        axis: Axis,
        room: int,
        codec: Codec,
        piece_numel: int,
    ) -> None:
        super().__init__(params, indices, axis, room)
        sizes = _piece_sizes(self._numel(), piece_numel, self._world)
        self._row = torch.zeros(sum(sizes), device=params[0].device)
        self._views = self._split(self._row)
        self._residual = torch.zeros(sum(sizes) if codec.feeds_back else 0, device=self._row.device)
        self.residuals = self._split(self._residual) if codec.feeds_back else []
        """By parameter, in the order of `params`; empty where the codec does not feed back."""
        rows = torch.split(self._row, sizes)
        residuals = torch.split(self._residual, sizes) if codec.feeds_back else [None] * len(sizes)
        tails = [len(params) + room, *[0] * (len(sizes) - 1)]  # the first piece tells what is there, and the message
        kind = _Whole if self._world == 2 else _Divided
        self._pieces = [kind(*of, axis, codec) for of in zip(rows, residuals, tails, strict=True)]
        self.num_bytes = sum(piece.num_bytes for piece in self._pieces)
        self._messages: list[bytes] = []

    def begin(self, nodes: Sequence[Sequence[Node]], count: int) -> None:
        self._senders = [rank for rank, held in enumerate(nodes) if held]
        self._present = [False] * len(self.params)

    def fill(self, below: Sequence[Gradients], merges: int) -> None:
        (values,) = self._take(below, len(below))  # a node of its own for each would be more bytes
        copy_gradients_(self._views, values)
        self._present = [value is not None for value in values]

    def start(self, axis: Axis, name: str) -> None:
        """Send each owner its part, and every rank which gradients are there and the message."""
        tail = bytes(self._present) + self.message.ljust(self._room, b"\0")
        with self._leaving_out_absent():
            for piece in self._pieces:
                piece.send(axis, name, self._senders, tail)

    def sum_part(self, axis: Axis, name: str) -> None:
        first, *others = self._pieces
        first.receive()
        self._read(first.tails())
        with self._leaving_out_absent():
            first.send_sum(axis, name)
            for piece in others:
                piece.receive()
                piece.send_sum(axis, name)

    def give(self) -> None:
        for piece in self._pieces:
            piece.receive_sum()
        for param, view, present in zip(self.params, self._views, self._present, strict=True):
            param.grad = view if present else None

    def messages(self) -> list[bytes]:
        return self._messages

    def gather_residuals(self, axis: Axis, name: str) -> dict[int, Tensor]:
        """On rank 0 a row for each rank, by parameter; nothing on the others."""
        if not self.residuals:
            return {}
        length, chief = len(self._residual), self._rank == 0
        rows = self._residual.new_empty(self._world if chief else 0, length)
        sizes = [length if chief else 0] * self._world
        axis.all_to_all_start(rows.view(-1), self._residual, sizes, [length] + [0] * (self._world - 1), name).wait()
        if not chief:
            return {}
        columns = torch.split(rows, [*(param.numel() for param in self.params), length - self._numel()], dim=1)
        shapes = [(self._world, *param.shape) for param in self.params]
        return {i: column.reshape(shape) for i, column, shape in zip(self.indices, columns, shapes, strict=False)}

    @contextmanager
    def _leaving_out_absent(self) -> Iterator[None]:
        """A parameter without a gradient may be left alone by all: what it is owed must not be spent on it now."""
        absent = [r for r, present in zip(self.residuals, self._present, strict=False) if not present]
        kept = [residual.clone() for residual in absent]
        for residual in absent:
            residual.zero_()
        yield
        for residual, owed in zip(absent, kept, strict=True):
            residual.copy_(owed)

    def _read(self, tails: Mapping[int, bytes]) -> None:
        self._messages = [b""] * self._world
        self._messages[self._rank], self.message = self.message.ljust(self._room, b"\0"), b""
        for rank, tail in tails.items():
            self._present = [mine or bool(theirs) for mine, theirs in zip(self._present, tail, strict=False)]
            self._messages[rank] = tail[len(self.params) :]

    def _split(self, flat: Tensor) -> list[Tensor]:
        pieces = torch.split(flat, [*(param.numel() for param in self.params), len(flat) - self._numel()])
        return [piece.view_as(param) for piece, param in zip(pieces, self.params, strict=False)]

    def _numel(self) -> int:
        return sum(param.numel() for param in self.params)


class _Piece(ABC):
    """Some of a bucket's row, on its way to the others and, as a sum, back. In this order: the methods below.

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


class _Whole(_Piece):
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


class _Divided(_Piece):
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


def _piece_sizes(numel: int, most: int, world: int) -> list[int]:
    """Pieces that all ranks have equal parts of, together at least `numel` values."""
    whole = max(1, most // world) * world
    count, rest = divmod(numel, whole)
    last = -(-rest // world) * world
    sizes = [whole] * count + ([last] if last else [])
    return sizes or [world]
