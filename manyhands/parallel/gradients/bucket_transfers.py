"""All-reduce of a bucket's gradients over an axis: exact, or through a codec.

Exact: each rank sends the nodes of the slice tree that it holds, the owner of a part finishes its sum along the tree,
and all ranks gather the parts; which parameters have a gradient, and the bytes of `carry`, are further numbers of the
same sum. Through a codec: a rank adds up all of its slices first, as sending several nodes would take more bytes; so
the sum depends on the number of ranks. Start reading at `ExactTransfer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from manyhands.comm.axis import Axis, Pending
from manyhands.comm.codecs import Codec
from manyhands.parallel.gradients.compressed_all_reduce import CompressedAllReduce, gather_rows
from manyhands.parallel.gradients.gradient_lists import Gradients, add_lists, copy_gradients_
from manyhands.parallel.gradients.slice_tree import Node, finish

__all__ = ["CompressedTransfer", "ExactTransfer", "reduce_scatter_start"]


def reduce_scatter_start(
    axis: Axis, rows: Sequence[Tensor], nodes: Sequence[Sequence[Node]], count: int, name: str
) -> Callable[[], Tensor]:
    """Send each rank its part of this rank's nodes `rows`; returns a function that waits for this rank's part.

    A row has a part for every rank, one after the other; rank r holds `nodes[r]` of the tree over `count` slices. The
    function returns the sum of this rank's part over all nodes.
    """
    part, mine = len(rows[0]) // axis.size, len(nodes[axis.rank])
    if mine > 1:
        outgoing = torch.stack([row.view(axis.size, part) for row in rows[:mine]], 1).view(-1)
    else:  # one row without a copy, or nothing of it
        outgoing = rows[0][: mine * axis.size * part]
    sizes = [len(held) * part for held in nodes]
    incoming = rows[0].new_empty(sum(sizes))
    pending = axis.all_to_all_start(incoming, outgoing, sizes, [mine * part] * axis.size, name)
    return partial(_finish_part, pending, outgoing, incoming.view(-1, part), nodes, count)


def _finish_part(
    pending: Pending, outgoing: Tensor, incoming: Tensor, nodes: Sequence[Sequence[Node]], count: int
) -> Tensor:
    pending.wait()  # until then `outgoing` must stay alive
    received = iter(incoming)
    partials: dict[Node, Tensor] = {node: next(received) for held in nodes for node in held}
    return finish(partials, count, add=lambda left, right: left.add_(right))


class ExactTransfer:
    """The gradients of some parameters in one flat tensor, a row per node of the slice tree; counts and messages last.

    Per step: `begin`, `fill`, `send`, `send_sum`, `receive_sum`, and then the sums are in `views`, by parameter. The
    `message` of each rank is sent with them, as numbers from 0 to 255, which every dtype adds to the zeros of the other
    ranks without rounding.
    """

    residuals: Sequence[Tensor] = ()

    def __init__(self, params: Sequence[nn.Parameter], axis: Axis, message_bytes: int) -> None:
        """`message_bytes` is how long a rank's message may be."""
        self.message, self._params, self._axis, self._message_bytes = b"", params, axis, message_bytes
        numel = sum(param.numel() + 1 for param in params) + axis.size * message_bytes
        self._length = -(-numel // axis.size) * axis.size
        self.num_bytes = self._length * params[0].element_size()
        self._rows = params[0].new_empty(0, self._length)
        self._make_room(1)

    def begin(self, nodes: Sequence[Sequence[Node]], count: int) -> None:
        """A step of `count` slices, of which rank r holds `nodes[r]`."""
        self._nodes, self._count = nodes, count
        # Addition is commutative: with two ranks that hold one node each, the backend's sum is that of the tree.
        self._direct = self._axis.size == 2 and all(len(held) == 1 for held in nodes)

    def fill(self, nodes: Sequence[Gradients]) -> None:
        """Take this rank's gradients, a list for each of its nodes, in slice order."""
        self._make_room(len(nodes))
        for number, values in enumerate(nodes):
            present = copy_gradients_(self._views[number], values)
            if all(present):
                self._counts[number].fill_(1)
            else:
                self._counts[number].copy_(torch.tensor(present))
            if self._message_bytes:
                self._write_message(number)

    def _write_message(self, number: int) -> None:
        messages = self._messages[number].zero_()
        if number == 0 and self.message:
            mine = torch.frombuffer(bytearray(self.message), dtype=torch.uint8)
            messages[self._axis.rank * self._message_bytes :][: len(mine)] = mine
            self.message = b""

    def messages(self) -> list[bytes]:
        """Every rank's `message`, followed by zeros; after `receive_sum`."""
        data, length = self._messages[0].to(torch.uint8).cpu().numpy().tobytes(), self._message_bytes
        return [data[rank * length : (rank + 1) * length] for rank in range(self._axis.size)]

    def send(self, name: str) -> None:
        if self._direct:
            self._pending = self._axis.sum_start(self._rows[0], name)
        else:
            self._part = reduce_scatter_start(self._axis, self._rows.unbind(), self._nodes, self._count, name)

    def send_sum(self, name: str) -> None:
        """Finish the sum of the part that this rank owns, and start collecting the others'."""
        if not self._direct:
            self._sum = self._part()
            del self._part  # and with it a copy of what was sent
            # The rows have been sent by now, so the whole sum can overwrite them.
            self._pending = self._axis.all_gather_start(self._rows[0], self._sum, name)

    def receive_sum(self) -> list[bool]:
        """Wait for the whole sum; returns whether each parameter has a gradient on some rank."""
        self._pending.wait()
        return list(map(bool, self._counts[0].tolist()))

    def gather_residuals(self, name: str) -> list[Tensor]:
        """There are none: nothing is rounded."""
        return []

    def _make_room(self, num_rows: int) -> None:
        if num_rows <= len(self._rows):
            return
        self._rows = torch.zeros(num_rows, self._length, dtype=self._rows.dtype, device=self._rows.device)
        sizes = [param.numel() for param in self._params]
        used = [*sizes, len(sizes), self._axis.size * self._message_bytes]
        pieces = [row.split([*used, self._length - sum(used)]) for row in self._rows]
        self._views = [_shaped(row, self._params) for row in pieces]
        self.views = self._views[0]
        self._counts = [row[len(sizes)] for row in pieces]
        self._messages = [row[len(sizes) + 1] for row in pieces]


class CompressedTransfer:
    """The gradients in one flat tensor, which is sent encoded; the message, and which gradients exist, are not encoded.

    Where the codec has error feedback, `residuals` are by parameter what this rank has not sent to the others yet.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], axis: Axis, message_bytes: int, codec: Codec, piece_numel: int
    ) -> None:
        """A parameter may be larger than `piece_numel`."""
        self.message, self._params, self._axis, self._message_bytes = b"", params, axis, message_bytes
        sizes = [param.numel() for param in params]
        self._all_reduce = CompressedAllReduce(
            sum(sizes),
            axis,
            codec,
            piece_numel=piece_numel,
            tail_bytes=len(params) + message_bytes,
            device=params[0].device,
        )
        self.num_bytes = self._all_reduce.num_bytes
        self.views = _shaped(torch.split(self._all_reduce.values, sizes), params)
        self.residuals = _shaped(torch.split(self._all_reduce.residual, sizes), params) if codec.feeds_back else []

    def begin(self, nodes: Sequence[Sequence[Node]], count: int) -> None:
        self._all_reduce.arrange(list(map(len, nodes)))
        self._present = [False] * len(self._params)

    def fill(self, nodes: Sequence[Gradients]) -> None:
        *below, values = nodes
        for node in reversed(below):
            values = add_lists(node, values)
        self._present = copy_gradients_(self.views, values)

    def send(self, name: str) -> None:
        tail = bytes(self._present) + self.message.ljust(self._message_bytes, b"\0")
        with self._leaving_out_absent():
            self._all_reduce.send(name, tail)

    def send_sum(self, name: str) -> None:
        self._read(self._all_reduce.receive())
        with self._leaving_out_absent():
            self._all_reduce.send_sum(name)

    def receive_sum(self) -> list[bool]:
        self._all_reduce.receive_sum()
        return self._present

    def messages(self) -> list[bytes]:
        return self._messages

    def gather_residuals(self, name: str) -> list[Tensor]:
        """On rank 0 the residuals by parameter, a row for each rank; empty on the other ranks. A collective."""
        if not self.residuals:
            return []
        world, chief = self._axis.size, self._axis.rank == 0
        rows = gather_rows(self._axis, self._all_reduce.residual, name)
        columns = torch.split(rows, [param.numel() for param in self._params], dim=1) if chief else ()
        return [column.reshape(world, *param.shape) for column, param in zip(columns, self._params, strict=False)]

    @contextmanager
    def _leaving_out_absent(self) -> Iterator[None]:
        """Set aside residuals of parameters without a gradient: if no rank has one, the step does not update them."""
        absent = [r for r, present in zip(self.residuals, self._present, strict=False) if not present]
        kept = [residual.clone() for residual in absent]
        for residual in absent:
            residual.zero_()
        yield
        for residual, value in zip(absent, kept, strict=True):
            residual.copy_(value)

    def _read(self, tails: Mapping[int, bytes]) -> None:
        self._messages = [b""] * self._axis.size
        self._messages[self._axis.rank], self.message = self.message.ljust(self._message_bytes, b"\0"), b""
        for rank, tail in tails.items():
            self._present = [mine or bool(theirs) for mine, theirs in zip(self._present, tail, strict=False)]
            self._messages[rank] = tail[len(self._params) :]


def _shaped(flats: Sequence[Tensor], params: Sequence[nn.Parameter]) -> list[Tensor]:
    return [flat.view_as(param) for flat, param in zip(flats, params, strict=False)]
