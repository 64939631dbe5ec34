"""Combines one flat vector per rank by an averaging rule, in two phases between which training steps may run.

First (all-to-all) every rank sends part j of its vector to rank j, which combines the parts it receives; then all ranks
all-gather the results. This moves as many bytes as a ring all-reduce, works for rules that are not sums, and leaves the
same bits on every rank. Ranks that average in pairs need one phase. Vectors are sent in pieces, so that no collective
on a slow link exceeds its timeout. Start reading at `Combination`.
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
    """One combination in progress. All ranks call `begin`, `advance` and `finish`, in that order.

    `rule` combines a tensor of one vector per rank, coordinate by coordinate. With a codec, both phases send encoded
    bytes, and all ranks decode the same bytes. It belongs to one group of ranks and is dropped when the group changes.
    """

    def __init__(
        self,
        vector: Tensor,
        axis: Axis,
        rule: Combine,
        codec: Codec | None,
        name: str,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._vector = vector
        self._pieces = [_Piece(piece, axis, rule, codec, name) for piece in _cut(vector, piece_bytes)]

    @property
    def bytes_sent(self) -> int:
        return sum(piece.bytes_sent for piece in self._pieces)

    def begin(self) -> None:
        for piece in self._pieces:
            piece.begin()

    def advance(self) -> None:
        """Combine the parts that this rank received and start the all-gather. A second call does nothing."""
        for piece in self._pieces:
            piece.advance()

    def finish(self) -> Tensor:
        """The combined vector, the same on every rank."""
        self.advance()
        return torch.cat([piece.finish() for piece in self._pieces]) if self._pieces else self._vector


class _Piece:
    def __init__(self, vector: Tensor, axis: Axis, rule: Combine, codec: Codec | None, name: str) -> None:
        self._axis, self._rule, self._codec, self._name = axis, rule, codec, name
        self._vector, self._part = vector, -(-vector.numel() // axis.size)
        self._advanced = False
        self.bytes_sent = 0

    def begin(self) -> None:
        axis = self._axis
        if axis.size == 1:
            return
        padded = self._vector.new_zeros(axis.size * self._part)
        padded[: self._vector.numel()] = self._vector
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
            self._result = self._rule(self._vector.view(1, -1))
            return
        self._pending.wait()
        vectors = self._decoded(self._incoming).view(self._axis.size, self._part)
        self._outgoing = self._encoded(self._rule(vectors), parts=1)
        self._pending = self._axis.all_gather_start(self._incoming, self._outgoing, f"{self._name} (gather)")

    def finish(self) -> Tensor:
        if self._axis.size > 1:
            self._pending.wait()
            self._result = self._decoded(self._incoming)[: self._vector.numel()]
        return self._result

    def _encoded(self, values: Tensor, parts: int | None = None) -> Tensor:
        if self._codec is None:
            return values
        parts = parts or self._axis.size
        data = torch.empty(parts, self._codec.num_bytes(self._part), dtype=torch.uint8, device=values.device)
        for encoded, part in zip(data, values.view(parts, -1), strict=True):
            self._codec.encode(part, encoded)
        return data.view(-1)

    def _decoded(self, data: Tensor) -> Tensor:
        if self._codec is None:
            return data
        values = torch.empty(self._axis.size, self._part, dtype=self._vector.dtype, device=data.device)
        for encoded, part in zip(data.view(self._axis.size, -1), values, strict=True):
            self._codec.decode(encoded, part)
        return values.view(-1)


def exchange_in_pair(vector: Tensor, axis: Axis, partner: int | None, name: str) -> Tensor:
    """The partner's vector, or this rank's own if it has no partner. All ranks call it; pairs do not overlap."""
    return torch.cat([_swapped(piece, axis, partner, name) for piece in _cut(vector, PIECE_BYTES)])


def _swapped(vector: Tensor, axis: Axis, partner: int | None, name: str) -> Tensor:
    if axis.size == 1:
        return vector
    sizes = [vector.numel() if rank == partner else 0 for rank in range(axis.size)]
    received = vector.new_empty(sum(sizes))
    outgoing = vector if partner is not None else vector[:0]
    axis.all_to_all_start(received, outgoing, sizes, sizes, name).wait()
    return received if partner is not None else vector


def to_first_rank(data: bytes, axis: Axis, name: str, piece_bytes: int = PIECE_BYTES) -> Sequence[bytes]:
    """Gather the bytes of every rank on rank 0; the other ranks get an empty list."""
    if axis.size == 1:
        return [data]
    lengths = axis.all_gather(torch.tensor(len(data)), f"{name} (lengths)")
    buffers = [bytearray() for _ in range(axis.size)]
    for start in range(0, int(lengths.max()), piece_bytes):
        sizes = [max(0, min(piece_bytes, int(length) - start)) for length in lengths]
        for buffer, piece in zip(
            buffers, _to_first_rank(data[start : start + piece_bytes], sizes, axis, name), strict=False
        ):
            buffer += piece
    return [bytes(buffer) for buffer in buffers] if axis.rank == 0 else []


def _to_first_rank(data: bytes, sizes: Sequence[int], axis: Axis, name: str) -> list[bytes]:
    receive_sizes = [size if axis.rank == 0 else 0 for size in sizes]
    send_sizes = [len(data) if rank == 0 else 0 for rank in range(axis.size)]
    received = torch.empty(sum(receive_sizes), dtype=torch.uint8)
    sent = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    axis.all_to_all_start(received, sent, receive_sizes, send_sizes, name).wait()
    parts: Sequence[Tensor] = received.split(receive_sizes)  # type: ignore[no-untyped-call]
    return [part.numpy().tobytes() for part in parts]


def _cut(vector: Tensor, piece_bytes: int) -> Sequence[Tensor]:
    pieces: Sequence[Tensor] = vector.split(max(1, piece_bytes // vector.element_size()))  # type: ignore[no-untyped-call]
    return pieces
