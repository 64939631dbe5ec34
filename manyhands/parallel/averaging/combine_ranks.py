"""Rows of all ranks put together by a rule, in two moves that steps may lie between.

First every rank sends part j of its row to rank j, which puts those parts together; then all gather the results. It
moves the bytes of a ring, works for rules that are no sums, and leaves the same bits on every rank. Between two ranks
that average in pairs there is one move. Rows travel in pieces, so that no collective takes longer on a slow link than a
collective may. Start reading at `Combination`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from manyhands.comm.axis import Axis
from manyhands.comm.codecs import Codec

__all__ = ["Combination", "exchange_in_pair", "to_first_rank"]

PIECE_BYTES = 4 * 2**20
Combine = Callable[[Tensor], Tensor]


class Combination:
    """One row of each rank, on its way. `begin`, `advance` and `finish` are for all ranks, in that order.

    `rule` puts a tensor of one row per rank together, each coordinate by itself. With a codec what travels is its
    bytes, both ways; all ranks decode the same. It belongs to one group of ranks: where that changes, it is dropped.
    """

    def __init__(
        self,
        row: Tensor,
        axis: Axis,
        rule: Combine,
        codec: Codec | None,
        name: str,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._row = row
        self._pieces = [_Piece(piece, axis, rule, codec, name) for piece in _cut(row, piece_bytes)]

    @property
    def bytes_sent(self) -> int:
        return sum(piece.bytes_sent for piece in self._pieces)

    def begin(self) -> None:
        for piece in self._pieces:
            piece.begin()

    def advance(self) -> None:
        """Put this rank's parts together, and have them gathered. Once; a second call does nothing."""
        for piece in self._pieces:
            piece.advance()

    def finish(self) -> Tensor:
        """What the rows have become, on every rank."""
        self.advance()
        return torch.cat([piece.finish() for piece in self._pieces]) if self._pieces else self._row


class _Piece:
    def __init__(self, row: Tensor, axis: Axis, rule: Combine, codec: Codec | None, name: str) -> None:
        self._axis, self._rule, self._codec, self._name = axis, rule, codec, name
        self._row, self._part = row, -(-row.numel() // axis.size)
        self._advanced = False
        self.bytes_sent = 0

    def begin(self) -> None:
        axis = self._axis
        if axis.size == 1:
            return
        padded = self._row.new_zeros(axis.size * self._part)
        padded[: self._row.numel()] = self._row
        self._outgoing = self._encoded(padded)
        self._incoming = torch.empty_like(self._outgoing)
        sizes = [self._outgoing.numel() // axis.size] * axis.size
        self._pending = axis.all_to_all_start(self._incoming, self._outgoing, sizes, sizes, self._name)
        self.bytes_sent = 2 * (axis.size - 1) * sizes[0] * self._outgoing.element_size()

    def advance(self) -> None:
        if self._advanced:
            return
        self._advanced = True
        if self._axis.size == 1:
            self._result = self._rule(self._row.view(1, -1))
            return
        self._pending.wait()
        rows = self._decoded(self._incoming).view(self._axis.size, self._part)
        self._outgoing = self._encoded(self._rule(rows), parts=1)
        self._pending = self._axis.all_gather_start(self._incoming, self._outgoing, f"{self._name} (gather)")

    def finish(self) -> Tensor:
        if self._axis.size > 1:
            self._pending.wait()
            self._result = self._decoded(self._incoming)[: self._row.numel()]
        return self._result

    def _encoded(self, values: Tensor, parts: int | None = None) -> Tensor:
        if self._codec is None:
            return values
        parts = parts or self._axis.size
        data = torch.empty(parts, self._codec.num_bytes(self._part), dtype=torch.uint8, device=values.device)
        for line, part in zip(data, values.view(parts, -1), strict=True):
            self._codec.encode(part, line)
        return data.view(-1)

    def _decoded(self, data: Tensor) -> Tensor:
        if self._codec is None:
            return data
        values = torch.empty(self._axis.size, self._part, dtype=self._row.dtype, device=data.device)
        for line, part in zip(data.view(self._axis.size, -1), values, strict=True):
            self._codec.decode(line, part)
        return values.view(-1)


def exchange_in_pair(row: Tensor, axis: Axis, partner: int | None, name: str) -> Tensor:
    """The partner's row; one's own where there is none. All ranks take part, each with at most one other."""
    return torch.cat([_swapped(piece, axis, partner, name) for piece in _cut(row, PIECE_BYTES)])


def _swapped(row: Tensor, axis: Axis, partner: int | None, name: str) -> Tensor:
    if axis.size == 1:
        return row
    sizes = [row.numel() if rank == partner else 0 for rank in range(axis.size)]
    received = row.new_empty(sum(sizes))
    outgoing = row if partner is not None else row[:0]
    axis.all_to_all_start(received, outgoing, sizes, sizes, name).wait()
    return received if partner is not None else row


def to_first_rank(data: bytes, axis: Axis, name: str, piece_bytes: int = PIECE_BYTES) -> Sequence[bytes]:
    """Every rank's bytes, on rank 0; nothing on the others."""
    if axis.size == 1:
        return [data]
    lengths = torch.empty(axis.size, dtype=torch.int64)
    axis.all_gather_start(lengths, torch.tensor([len(data)]), f"{name} (lengths)").wait()
    everyone = [bytearray() for _ in range(axis.size)]
    for start in range(0, int(lengths.max()), piece_bytes):
        sizes = [max(0, min(piece_bytes, int(length) - start)) for length in lengths]
        for whole, piece in zip(
            everyone, _to_first_rank(data[start : start + piece_bytes], sizes, axis, name), strict=False
        ):
            whole += piece
    return [bytes(whole) for whole in everyone] if axis.rank == 0 else []


def _to_first_rank(data: bytes, sizes: Sequence[int], axis: Axis, name: str) -> list[bytes]:
    coming = [size if axis.rank == 0 else 0 for size in sizes]
    going = [len(data) if rank == 0 else 0 for rank in range(axis.size)]
    received = torch.empty(sum(coming), dtype=torch.uint8)
    sent = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    axis.all_to_all_start(received, sent, coming, going, name).wait()
    parts: Sequence[Tensor] = received.split(coming)  # type: ignore[no-untyped-call]
    return [part.numpy().tobytes() for part in parts]


def _cut(row: Tensor, piece_bytes: int) -> Sequence[Tensor]:
    pieces: Sequence[Tensor] = row.split(max(1, piece_bytes // row.element_size()))  # type: ignore[no-untyped-call]
    return pieces
