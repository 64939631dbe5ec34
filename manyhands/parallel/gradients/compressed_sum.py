"""The gradient sum in fewer bytes: what ranks send each other goes through a codec, fp32 in, fp32 out.

A rank adds up its own slices; `compressed_all_reduce` does the rest. What is given up is that the sum is the same for
every number of ranks. Which parameters had a gradient, and the bytes of `carry`, travel beside as they are.

Where the codec feeds back, a rank keeps one number per value of the gradient: in the part that it owns, what its sums
have not told; elsewhere, and everywhere with two ranks, what it has not told the others. Both are in the unit of the
sum, so wherever such a residual ends up after a change of ranks or buckets, adding it to what is sent next makes up for
it. The sum of all ranks' residuals is what the weights have not seen yet. Start reading at `CodedBucket.start`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from manyhands.comm.axis import Axis
from manyhands.comm.codecs import Codec
from manyhands.parallel.gradients.compressed_all_reduce import most_numel, new_letters
from manyhands.parallel.gradients.network_sum import Bucket, Gradients, GradientSum, copy_gradients_
from manyhands.parallel.gradients.slice_tree import Node

__all__ = ["CodedGradientSum", "CodedResiduals"]


class CodedResiduals(Protocol):
    """What sums through a codec owe, wherever they are made."""

    @property
    def params(self) -> Sequence[nn.Parameter]: ...
    @property
    def settled_order(self) -> list[int] | None:
        """The order that the buckets settled on: with it, another object rounds as this one does."""

    def residuals(self) -> dict[int, Tensor]:
        """This rank's, by the parameter's place in `params`; they change with the next step."""

    def gather_residuals(self) -> dict[int, Tensor]:
        """On rank 0 all residuals by parameter, in rows; nothing on the others. A collective."""

    def restore(self, order: Sequence[int] | None, rows: Mapping[int, Tensor]) -> None:
        """Go on from what `settled_order` and `gather_residuals` were."""

    def succeed(self, before: CodedResiduals) -> None:
        """Owe what `before` owes to parameters of both, in its order if they are the same ones. A collective."""

    def scale_residuals(self, factor: float) -> None:
        """Gradients are `factor` times as large from now on."""


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
    def settled_order(self) -> list[int] | None:
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

    def succeed(self, before: CodedResiduals) -> None:
        """Owe what `before` owes to parameters of both, in its order if they are the same ones."""
        place = {id(param): index for index, param in enumerate(self.params)}
        moved = [place.get(id(param)) for param in before.params]
        order = None
        order_before = before.settled_order
        if order_before is not None and None not in moved and len(moved) == len(self.params):
            order = [place[id(before.params[index])] for index in order_before]
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
        piece_numel = most_numel(self._axis.size, self._bucket_bytes)
        return CodedBucket(params, indices, self._axis, room, self._codec, piece_numel)


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
        self._pieces = [new_letters(*of, axis, codec) for of in zip(rows, residuals, tails, strict=True)]
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


def _piece_sizes(numel: int, most: int, world: int) -> list[int]:
    """Pieces that all ranks have equal parts of, together at least `numel` values."""
    whole = max(1, most // world) * world
    count, rest = divmod(numel, whole)
    last = -(-rest // world) * world
    sizes = [whole] * count + ([last] if last else [])
    return sizes or [world]
