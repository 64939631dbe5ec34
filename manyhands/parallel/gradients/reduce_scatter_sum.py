"""Gradients of parameters that are divided over ranks: each rank gets the sum of its part, along the slice tree.

Torch's `fully_shard` decides when a block is gathered and when its gradients are ready; how they travel is ours, so
that sums are those of every other strategy, bit for bit. A rank adds up its own slices and sends once per step, with
its last pass. All ranks make as many passes: one with fewer slices than others makes some that count for nothing.
Start reading at `ShardedSum`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.comm.axis import Axis, Pending
from manyhands.comm.peer_waits import Waiting
from manyhands.comm.shared_memory_axis import PlaneAxis
from manyhands.parallel.gradients.slice_tree import Node, Stack, finish, nodes_of, program

__all__ = ["Gathering", "GroupSum", "ShardedSum"]


class Gathering:
    """How the parts of a block's parameters come together: what torch calls an `AllGather`."""

    def __init__(self, axis: Axis, name: str) -> None:
        self._axis, self._name = axis, f"parameters of {name}"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        self._axis.all_gather_start(output_tensor, input_tensor, self._name).wait()


class ShardedSum:
    """Of the parameters of one model, with the verbs of `GradientSum`; sums are this rank's parts of them.

    Whatever ranks tell each other besides travels once per step, in `finish`: no rank may wait for another one between
    two gatherings that the other has yet to come to.
    """

    def __init__(self, params: Sequence[nn.Parameter], axis: Axis, network: Callable[[], Axis]) -> None:
        """`network` is an axis over sockets, for sums that shared memory has no way for."""
        self.params, self._axis, self._network = list(params), axis, network
        self.groups: list[GroupSum] = []
        self.under_way = GroupSum(self, "nothing")
        """Whose sum is being made."""
        self.sharded: list[nn.Parameter] = []
        """What torch has in place of each parameter, at rest: its gradient comes there first."""
        self.used: set[int] = set()
        """Places of the parameters that had a gradient on this rank, in this step."""
        self.bytes_sent = 0
        self._message, self._room = b"", 0
        self._shares: Sequence[range] | None = None

    @property
    def waits(self) -> list[Waiting]:
        return [self._axis.waiting]

    def begin(self, count: int, shares: Sequence[range], name: str) -> None:
        """Start a step of `count` slices, of which rank r computes `shares[r]`."""
        self._name, self._passes_left, self.bytes_sent = name, max(map(len, shares)), 0
        self.used.clear()
        for param in self.params:
            param.grad = None
        self._message, self._room = b"", 0
        if shares is not self._shares:
            self._shares, nodes = shares, [nodes_of(share, count) for share in shares]
            self.exchange = _exchange(self._axis, self._network, nodes, count)
        for group in self.groups:
            group.begin(count)

    @property
    def passes_left(self) -> int:
        """How many times backward has yet to run, on every rank."""
        return self._passes_left

    @property
    def is_last_pass(self) -> bool:
        return self._passes_left == 1

    def before_backward(self, v: int | None) -> None:
        """Backward of slice `v` comes next, or with None of one that another rank counts."""
        assert self._passes_left > 0, "all ranks have agreed on fewer passes"
        self._used_before = set(self.used)
        for group in self.groups:
            group.enter(v)

    def after_backward(self, v: int | None) -> None:
        self._passes_left -= 1
        if v is None:
            self.used &= self._used_before
        if self._passes_left:
            for sharded in self.sharded:
                sharded.grad = None

    def finish(self) -> None:
        """Leave this rank's part of the sum over all slices in `.grad`, None where no slice of any rank had one."""
        self.under_way.settle()
        for param, sharded in zip(self.params, self.sharded, strict=True):
            param.grad, sharded.grad = _local(sharded.grad), None
        self.bytes_sent = sum(group.bytes_sent for group in self.groups)
        self._tell_used()

    def _tell_used(self) -> None:
        """Who had a gradient where, and what ranks tell each other besides; who had none anywhere keeps None."""
        mask = bytes(place in self.used for place in range(len(self.params)))
        told = self._axis.all_gather_bytes(f"losses of {self._name}", mask + self._message)
        self._messages = [one[len(mask) :].ljust(self._room, b"\0") for one in told]
        for place, param in enumerate(self.params):
            if not any(one[place] for one in told):
                param.grad = None

    # A message of each rank, which travels with the end of the step.

    def can_carry(self, num_bytes: int) -> bool:
        self._room = num_bytes
        return True

    def carry(self, message: bytes) -> None:
        self._message = message

    def carried(self) -> list[bytes]:
        """Every rank's message, followed by zeros; after `finish`."""
        return self._messages

    def leave(self) -> None: ...

    close = leave


def _local(gradient: Any) -> Tensor | None:
    """This rank's part, in the same memory."""
    return None if gradient is None else gradient.to_local()


Exchanged = Callable[[Tensor, list[Tensor], str], Callable[[], None]]
"""Of where the sum goes, this rank's nodes, each a part for every rank, and a name: starts; the result ends it."""


class GroupSum:
    """Of a block's gradients, which torch hands over in one tensor: a part for every rank, one after the other.

    It is what torch calls a `ReduceScatter`. A block that is used several times in a forward pass comes as often in
    backward; each such instalment is summed by itself, and torch adds them up.
    """

    def __init__(self, owner: ShardedSum, name: str) -> None:
        self._owner, self._name = owner, f"gradients of {name}"
        self.bytes_sent = 0
        self._end: Callable[[], None] | None = None

    def begin(self, count: int) -> None:
        self._count, self.bytes_sent = count, 0
        self._stacks: list[Stack[Tensor]] = []

    def enter(self, v: int | None) -> None:
        self._slice, self._instalment = v, 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        if self._instalment == len(self._stacks):
            self._stacks.append(Stack(self._count, add=lambda left, right: left.add_(right)))
        stack = self._stacks[self._instalment]
        if self._slice is not None:
            stack.push(self._slice, input_tensor)
        self._instalment += 1
        if not self._owner.is_last_pass:
            output_tensor.zero_()  # what torch makes of it is dropped
            return
        self._owner.under_way.settle()  # one at a time: each holds as much as its block
        self._owner.under_way = self
        nodes = list(stack.values()) or [input_tensor]
        stack.clear()
        self.bytes_sent += sum(node.nbytes for node in nodes)
        self._end = self._owner.exchange(output_tensor, nodes, self._name)
        if self._instalment > 1:
            self.settle()

    def settle(self) -> None:
        """See to it that the sum is there."""
        end, self._end = self._end, None
        if end is not None:
            end()


def _exchange(axis: Axis, network: Callable[[], Axis], nodes: Sequence[Sequence[Node]], count: int) -> Exchanged:
    if isinstance(axis, PlaneAxis) and all(len(held) <= 1 for held in nodes):
        return _through_memory(axis, nodes, count)
    return _over_sockets(network(), nodes, count)


def _through_memory(axis: PlaneAxis, nodes: Sequence[Sequence[Node]], count: int) -> Exchanged:
    # A rank without a slice takes part with a node that no sum asks for.
    steps = program([held[0] if held else (-1, rank) for rank, held in enumerate(nodes)], count)

    def start(output: Tensor, held: list[Tensor], name: str) -> Callable[[], None]:
        axis.plane.reduce_scatter(output, held[0], steps, name)
        return lambda: None

    return start


def _over_sockets(axis: Axis, nodes: Sequence[Sequence[Node]], count: int) -> Exchanged:
    mine = len(nodes[axis.rank])

    def start(output: Tensor, held: list[Tensor], name: str) -> Callable[[], None]:
        part = output.numel()
        sizes = [len(theirs) * part for theirs in nodes]
        incoming = output.new_empty(sum(sizes))
        rows = [row.view(axis.size, part) for row in held[:mine]]
        outgoing = torch.stack(rows, 1).reshape(-1) if rows else output.new_empty(0)
        pending = axis.all_to_all_start(incoming, outgoing, sizes, [mine * part] * axis.size, name)
        return lambda: _sum_into(output, incoming, outgoing, pending)

    def _sum_into(output: Tensor, incoming: Tensor, outgoing: Tensor, pending: Pending) -> None:
        pending.wait()  # until then what is sent must live, too
        parts = iter(incoming.view(-1, output.numel()))
        partials = {node: next(parts) for held in nodes for node in held}
        output.copy_(finish(partials, count, add=lambda left, right: left.add_(right)))

    return start
