"""All-reduce of fp32 values through a codec: the result is bitwise equal on every rank.

Each rank owns a part of the values: it receives the encoded contributions of the other ranks to that part, adds the
decoded values along a tree over the ranks, and sends the encoded sum to all. Every rank, including the owner, uses what
those bytes decode to, so replicas never differ. Two ranks send each other everything instead: that is as many bytes, in
one trip instead of two, and both add what the same two messages decode to.

Where the codec has error feedback, a rank keeps one number per value, its residual: in the part that it owns, what its
sums have left out; elsewhere, and everywhere with two ranks, what it has not sent to the others. Both are in the unit
of the sum, so whichever rank has a residual after a change of ranks or buckets, adding it to what is sent next corrects
the error. The sum of all ranks' residuals is what the weights still lack. Start reading at `CompressedAllReduce`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.comm.axis import Axis
from manyhands.comm.codecs import Codec, aligned
from manyhands.parallel.gradients.slice_tree import finish

__all__ = ["CompressedAllReduce", "gather_rows", "most_numel"]

# Before encoding: small enough that the first is sent early, and one is encoded while another is being sent.
PIECE_BYTES = 2**20
CPU = torch.device("cpu")


def most_numel(world: int, bucket_bytes: int) -> int:
    """How many values to send together between so many ranks."""
    return min(bucket_bytes, (world if world > 2 else 1) * PIECE_BYTES) // 4


class CompressedAllReduce:
    """Replaces `values` of every rank of `axis` by their sum: in a step `send`, `receive`, `send_sum`, `receive_sum`.

    They are sent in pieces of at most `piece_numel`: one is encoded while another is being sent. Every rank also
    receives `tail_bytes` of each other sender, without encoding.
    """

    def __init__(
        self,
        numel: int,
        axis: Axis,
        codec: Codec,
        *,
        piece_numel: int | None = None,
        tail_bytes: int = 0,
        device: torch.device = CPU,
    ) -> None:
        sizes = _piece_sizes(numel, numel + axis.size if piece_numel is None else piece_numel, axis.size)
        row, residual = (torch.zeros(sum(sizes) if there else 0, device=device) for there in (True, codec.feeds_back))
        self.values, self._padding, self.residual = row[:numel], row[numel:], residual[:numel]
        """The residual is what is still to be sent of `values`; empty where the codec has no error feedback."""
        self.rows = [self.values]
        residuals = torch.split(residual, sizes) if codec.feeds_back else [None] * len(sizes)
        tails = [tail_bytes, *[0] * (len(sizes) - 1)]  # the first piece carries the tail
        self._pieces = [_Piece(*of, axis, codec) for of in zip(torch.split(row, sizes), residuals, tails, strict=True)]
        self.num_bytes = sum(piece.num_bytes for piece in self._pieces)

    def arrange(self, num_nodes: Sequence[int]) -> None:
        """Set the senders: a rank that holds no node of the slice tree has nothing to send."""
        self._senders = [rank for rank, num in enumerate(num_nodes) if num]

    def send(self, name: str, tail: bytes = b"") -> None:
        self._padding.zero_()  # where a value was not finite, all of its block came back as NaN
        for piece in self._pieces:
            piece.send(name, self._senders, tail)

    def receive(self) -> dict[int, bytes]:
        """The tails of the other senders, by rank."""
        self._pieces[0].receive()
        return self._pieces[0].tails()

    def send_sum(self, name: str) -> None:
        """Sum the part that this rank owns, and send it to the others."""
        for number, piece in enumerate(self._pieces):
            if number:
                piece.receive()
            piece.send_sum(name)

    def receive_sum(self) -> list[Tensor]:
        for piece in self._pieces:
            piece.receive_sum()
        return self.rows


def gather_rows(axis: Axis, mine: Tensor, name: str) -> Tensor:
    """On rank 0 the values of every rank, a row each; no rows on the other ranks. A collective."""
    length, chief = len(mine), axis.rank == 0
    rows = mine.new_empty(axis.size if chief else 0, length)
    sizes = [length if chief else 0] * axis.size
    axis.all_to_all_start(rows.view(-1), mine, sizes, [length] + [0] * (axis.size - 1), name).wait()
    return rows


def _piece_sizes(numel: int, most: int, world: int) -> list[int]:
    """Sizes of pieces that divide evenly over the ranks, together at least `numel` values."""
    whole = max(1, most // world) * world
    count, rest = divmod(numel, whole)
    last = -(-rest // world) * world
    sizes = [whole] * count + ([last] if last else [])
    return sizes or [world]


class _Piece:
    """A message to each other rank: some of this rank's values, encoded, and a tail that is the same for all.

    `values` are this rank's contribution until `send`, then all contributions to the part that it owns, then the sum.
    """

    def __init__(self, values: Tensor, residual: Tensor | None, tail_bytes: int, axis: Axis, codec: Codec) -> None:
        self._values, self._axis, self._rank, self._codec = values, axis, axis.rank, codec
        self._is_pair = axis.size == 2
        cut = 1 if self._is_pair else axis.size  # two ranks send each other all values
        self._parts = list(values.view(cut, -1)) * (axis.size // cut)
        self._residuals = [None] * axis.size if residual is None else list(residual.view(cut, -1)) * (axis.size // cut)
        self._coded_bytes, self._tail_bytes = codec.num_bytes(len(self._parts[0])), tail_bytes
        self._message_bytes = aligned(self._coded_bytes + tail_bytes)
        self._outgoing = self._new_bytes(axis.size - 1, self._message_bytes)
        self._incoming = torch.empty_like(self._outgoing)
        self.num_bytes = self._outgoing.numel()
        if not self._is_pair:
            self._coded_sum = self._new_bytes(self._coded_bytes)
            self._coded_sums = self._new_bytes(axis.size, self._coded_bytes)
            self.num_bytes += (axis.size - 1) * self._coded_bytes

    def send(self, name: str, senders: Sequence[int], tail: bytes) -> None:
        ranks, sends = range(self._axis.size), self._rank in senders
        self._senders, self._sources = senders, [rank for rank in senders if rank != self._rank]
        if sends:
            others = [rank for rank in ranks if rank != self._rank]
            for message, rank in zip(self._outgoing, others, strict=True):
                self._codec.encode(self._parts[rank], message[: self._coded_bytes], self._residuals[rank])
                if self._tail_bytes:
                    message[self._coded_bytes :][: len(tail)] = torch.frombuffer(bytearray(tail), dtype=torch.uint8)
        self._pending = self._axis.all_to_all_start(
            self._incoming[: len(self._sources)].view(-1),
            (self._outgoing if sends else self._outgoing[:0]).view(-1),
            [self._message_bytes if rank in self._sources else 0 for rank in ranks],
            [self._message_bytes if sends and rank != self._rank else 0 for rank in ranks],
            name,
        )

    def receive(self) -> None:
        """Decode the other ranks' contributions to this rank's part, over the parts that were sent to them."""
        self._pending.wait()
        for rank, message in zip(() if self._is_pair else self._sources, self._incoming, strict=False):
            self._codec.decode(message[: self._coded_bytes], self._parts[rank])

    def tails(self) -> dict[int, bytes]:
        """The tail of each other sender, by rank; after `receive`."""
        tails = self._incoming[:, self._coded_bytes : self._coded_bytes + self._tail_bytes].cpu().numpy()
        return {rank: tail.tobytes() for rank, tail in zip(self._sources, tails, strict=False)}

    def send_sum(self, name: str) -> None:
        if self._is_pair:  # addition of two values is commutative, so each rank computes the same sum
            mine = list(self._outgoing) if self._rank in self._senders else []
            for number, message in enumerate([*mine, *self._incoming[: len(self._sources)]]):
                self._codec.decode(message[: self._coded_bytes], self._values, add=number > 0)
            return
        contributions = {(0, number): self._parts[rank] for number, rank in enumerate(self._senders)}
        total = finish(contributions, len(self._senders), add=lambda left, right: left.add_(right))
        self._codec.encode(total, self._coded_sum, self._residuals[self._rank])
        self._pending = self._axis.all_gather_start(self._coded_sums.view(-1), self._coded_sum, name)

    def receive_sum(self) -> None:
        """Decode the whole sum, this rank's own part too, from bytes that all ranks have: replicas cannot differ."""
        if self._is_pair:
            return
        self._pending.wait()
        for coded, part in zip(self._coded_sums, self._parts, strict=True):
            self._codec.decode(coded, part)

    def _new_bytes(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=self._values.device)
