"""Gradients of parameters that are sharded over ranks: each rank gets the sum for its shard, along the slice tree.

Torch's `fully_shard` decides when a block is gathered and when its gradients are ready; this module does the
communication, so that sums are bitwise equal to those of every other strategy. A rank adds up its own slices and sends
once per step, in its last pass. All ranks run the same number of passes: a rank with fewer slices than others runs
dummy passes, whose gradients are discarded. Start reading at `ShardedSum`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.comm.axis import Axis
from manyhands.comm.peer_waits import Waiting
from manyhands.comm.shared_memory_axis import PlaneAxis
from manyhands.parallel.gradients.bucket_transfers import reduce_scatter_start
from manyhands.parallel.gradients.interface import Sum
from manyhands.parallel.gradients.slice_tree import Node, Stack, nodes_of, program

__all__ = ["FsdpSum", "Gathering", "GroupSum", "ShardedSum"]


class Gathering:
    """Gathers the shards of a block's parameters: what torch calls an `AllGather`."""

    def __init__(self, axis: Axis, name: str) -> None:
        self._axis, self._name = axis, f"parameters of {name}"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        self._axis.all_gather_start(output_tensor, input_tensor, self._name).wait()


class ShardedSum(Sum):
    """The sum for the parameters of one model; `finish` leaves this rank's shard of the sums in `.grad`.

    Ranks exchange their other reports once per step, in `finish`: a rank that waited for another between two
    all-gathers, which both have to enter, would deadlock.
    """

    passes_left = 0
    """How many times backward has yet to run, on every rank, where all run the same number of passes."""

    def __init__(self, params: Sequence[nn.Parameter], axis: Axis, network: Callable[[], Axis]) -> None:
        """`network` is an axis over sockets, for sums that shared memory does not support."""
        self.params, self._axis, self._network = list(params), axis, network
        self.used: set[int] = set()
        """Indices of the parameters that had a gradient on this rank, in this step."""
        self.bytes_sent = 0
        self._shares: Sequence[range] | None = None

    @property
    def waits(self) -> list[Waiting]:
        return [self._axis.waiting]

    def begin(self, count: int, shares: Sequence[range], name: str) -> None:
        self._name, self.bytes_sent = name, 0
        self.used.clear()
        for param in self.params:
            param.grad = None
        self._message, self._message_bytes = b"", 0
        if shares is not self._shares:
            self._shares, nodes = shares, [nodes_of(share, count) for share in shares]
            self.exchange = _exchange(self._axis, self._network, nodes, count)

    def before_backward(self, v: int | None) -> None:
        """Backward of slice `v` comes next, or with None a dummy pass."""

    def after_backward(self, v: int | None) -> None: ...

    def finish(self) -> None:
        """Exchange messages and which parameters had a gradient; where no rank had one, `.grad` becomes None."""
        mask = bytes(index in self.used for index in range(len(self.params)))
        reports = self._axis.all_gather_bytes(f"losses of {self._name}", mask + self._message)
        self._messages = [one[len(mask) :].ljust(self._message_bytes, b"\0") for one in reports]
        for index, param in enumerate(self.params):
            if not any(one[index] for one in reports):
                param.grad = None

    def can_carry(self, num_bytes: int) -> bool:
        self._message_bytes = num_bytes
        return True

    def carry(self, message: bytes) -> None:
        self._message = message

    def carried(self) -> list[bytes]:
        return self._messages

    def leave(self) -> None:
        """Nothing: no other training may use a sharded model."""


class FsdpSum(ShardedSum):
    """A sum to which torch passes gradients block by block, while backward runs."""

    def __init__(self, params: Sequence[nn.Parameter], axis: Axis, network: Callable[[], Axis]) -> None:
        super().__init__(params, axis, network)
        self.groups: list[GroupSum] = []
        self.under_way = GroupSum(self, "nothing")
        """The block whose sum is being computed."""
        self.sharded: list[nn.Parameter] = []
        """Torch's sharded parameter for each parameter: torch writes its gradient there first."""

    def begin(self, count: int, shares: Sequence[range], name: str) -> None:
        super().begin(count, shares, name)
        self.passes_left = max(map(len, shares))
        for group in self.groups:
            group.begin(count)

    @property
    def is_last_pass(self) -> bool:
        return self.passes_left == 1

    def before_backward(self, v: int | None) -> None:
        assert self.passes_left > 0, "all ranks have agreed on fewer passes"
        self._used_before = set(self.used)
        for group in self.groups:
            group.enter(v)

    def after_backward(self, v: int | None) -> None:
        self.passes_left -= 1
        if v is None:
            self.used &= self._used_before
        if self.passes_left:
            for sharded in self.sharded:
                sharded.grad = None

    def finish(self) -> None:
        self.under_way.settle()
        for param, sharded in zip(self.params, self.sharded, strict=True):
            param.grad, sharded.grad = _local(sharded.grad), None
        self.bytes_sent = sum(group.bytes_sent for group in self.groups)
        super().finish()


def _local(gradient: Any) -> Tensor | None:
    """This rank's shard, in the same memory."""
    return None if gradient is None else gradient.to_local()


Exchange = Callable[[Tensor, list[Tensor], str], Callable[[], object]]
"""(output, this rank's nodes, each with a part for every rank, name) -> a function that waits for the sum."""


class GroupSum:
    """Sums a block's gradients, which torch passes in one tensor: a part for every rank, one after the other.

    It is what torch calls a `ReduceScatter`. For a block that is used several times in a forward pass, torch calls it
    as often in backward; each call is a separate sum, and torch adds them up.
    """

    def __init__(self, owner: FsdpSum, name: str) -> None:
        self._owner, self._name = owner, f"gradients of {name}"
        self.bytes_sent = 0
        self._end: Callable[[], object] | None = None

    def begin(self, count: int) -> None:
        self._count, self.bytes_sent = count, 0
        self._stacks: list[Stack[Tensor]] = []

    def enter(self, v: int | None) -> None:
        self._slice, self._call_number = v, 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        if self._call_number == len(self._stacks):
            self._stacks.append(Stack(self._count, add=lambda left, right: left.add_(right)))
        stack = self._stacks[self._call_number]
        if self._slice is not None:
            stack.push(self._slice, input_tensor)
        self._call_number += 1
        if not self._owner.is_last_pass:
            output_tensor.zero_()  # the gradient that torch makes of it is dropped
            return
        self._owner.under_way.settle()  # one at a time: each holds as much as its block
        self._owner.under_way = self
        nodes = list(stack.values()) or [input_tensor]
        stack.clear()
        self.bytes_sent += sum(node.nbytes for node in nodes)
        self._end = self._owner.exchange(output_tensor, nodes, self._name)
        if self._call_number > 1:
            self.settle()

    def settle(self) -> None:
        """Wait until the sum is complete."""
        end, self._end = self._end, None
        if end is not None:
            end()


def _exchange(axis: Axis, network: Callable[[], Axis], nodes: Sequence[Sequence[Node]], count: int) -> Exchange:
    if isinstance(axis, PlaneAxis) and all(len(held) <= 1 for held in nodes):
        return _through_memory(axis, nodes, count)
    return _over_sockets(network(), nodes, count)


def _through_memory(axis: PlaneAxis, nodes: Sequence[Sequence[Node]], count: int) -> Exchange:
    # A rank without a slice contributes a node that the sum does not use.
    steps = program([held[0] if held else (-1, rank) for rank, held in enumerate(nodes)], count)

    def start(output: Tensor, held: list[Tensor], name: str) -> Callable[[], None]:
        axis.plane.reduce_scatter(output, held[0], steps, name)
        return lambda: None

    return start


def _over_sockets(axis: Axis, nodes: Sequence[Sequence[Node]], count: int) -> Exchange:
    def start(output: Tensor, held: list[Tensor], name: str) -> Callable[[], Tensor]:
        end = reduce_scatter_start(axis, held, nodes, count, name)
        return lambda: output.copy_(end())

    return start
