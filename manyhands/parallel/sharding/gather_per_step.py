"""Parameters that are sharded between steps and whole within them, with our own collectives instead of FSDP's.

If forward passes of several slices are in progress at a time, as in a pipeline, blocks cannot be gathered and resharded
per pass. So a step begins with whole parameters and ends with each rank's shard of their gradients; the optimizer sees
shards only. Parameters stay the user's objects, and are sharded along their first dim as in `fsdp_backend`. Start
reading at `GatherPerStep.divide`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.comm.axis import Axis
from manyhands.parallel.gradients.gradient_lists import Gradients, add_lists, take
from manyhands.parallel.gradients.reduce_scatter_sum import ShardedSum
from manyhands.parallel.gradients.slice_tree import Stack
from manyhands.parallel.model.tensor_shard import TensorShard, even_ranges
from manyhands.parallel.sharding.sharded_backend import ShardedBackend
from manyhands.parallel.sharding.sharded_update import ShardedUpdate, check_dividable, cut_states_, stays_whole

__all__ = ["GatherPerStep"]


class GatherPerStep(ShardedBackend):
    """Whole parameters from the beginning of a step to the end of its passes."""

    _buckets: Sequence[_Bucket] = ()
    is_whole = False
    """Parameters are whole between steps, for the user's code."""

    @property
    def shares(self) -> dict[int, TensorShard]:
        return {id(param): share for one in self._buckets for param, share in zip(one.params, one.shares, strict=True)}

    @property
    def divided_frozen(self) -> tuple[Tensor, ...]:
        return tuple(param for bucket in self._buckets for param in bucket.params if not bucket.trained)

    def divide(self) -> None:
        """Give each rank its shard. All ranks have the same values before; later calls do nothing."""
        if self._buckets:
            return
        check_dividable(self._model, self._optimizer)
        params = [param for param in self._model.parameters() if not stays_whole(param)]
        self._buckets = [_Bucket(bucket, self._axis) for bucket in _bucketed(params, self._bucket_bytes)]
        cut_states_(self._optimizer, self.shares)
        self.rest()
        trained = [bucket for bucket in self._buckets if bucket.trained]
        self.sum = ScatteredSum(trained, self._axis, self._network)
        self.weights = ShardedUpdate(self.sum.params, self._optimizer, self._axis)

    def before_step(self) -> None:
        """Gather all parameters. Called by all ranks."""
        for bucket in self._buckets:
            bucket.gather(self._axis)

    def rest(self) -> None:
        """Set the parameters to this rank's shards again."""
        for bucket in self._buckets:
            bucket.rest()

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Inside, parameters are whole, to read and to write; at the end rank 0's values are sharded again."""
        self.make_whole()
        try:
            yield
        finally:
            self.shard_again()

    def make_whole(self) -> None:
        """Give every rank all weights, until `shard_again`."""
        if not self.is_whole:
            self.before_step()
            self.is_whole = True

    def shard_again(self) -> None:
        """Keep this rank's shard of rank 0's weights."""
        if self.is_whole:
            self.is_whole = False
            self._axis.broadcast_([param for bucket in self._buckets for param in bucket.params], "weights of rank 0")
            for bucket in self._buckets:
                bucket.cut(self._axis)
            self.rest()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, parameters are whole, and each rank may run any number of forward passes."""
        if self.is_whole:
            yield
            return
        self.before_step()
        try:
            yield
        finally:
            self.rest()


class ScatteredSum(ShardedSum):
    """Reduce-scatters the slices' whole gradients once per step, along the slice tree: each rank gets its shard."""

    def __init__(self, buckets: Sequence[_Bucket], axis: Axis, network: Callable[[], Axis]) -> None:
        super().__init__([param for bucket in buckets for param in bucket.params], axis, network)
        self._buckets = buckets

    def begin(self, count: int, shares: Sequence[range], name: str) -> None:
        super().begin(count, shares, name)
        self._stack: Stack[Gradients] = Stack(count, add=add_lists)

    def after_backward(self, v: int | None) -> None:
        assert v is not None
        self._stack.push(v, [take(param) for param in self.params])

    def finish(self) -> None:
        nodes, first = list(self._stack.values()), 0
        self._stack.clear()
        self.used = {index for node in nodes for index, grad in enumerate(node) if grad is not None}
        for bucket in self._buckets:
            members = range(first, first := first + len(bucket.params))
            contributions = [bucket.packed(_take(node, members)) for node in nodes] or [
                bucket.packed([None] * len(members))
            ]
            self.bytes_sent += sum(one.nbytes for one in contributions)
            total = torch.empty_like(bucket.mine)
            self.exchange(total, contributions, f"gradients of {self._name}")()
            for param, part in zip(bucket.params, bucket.parts_of(total), strict=True):
                param.grad = part
        super().finish()


class _Bucket:
    """Parameters of one dtype and device that are sent together: one flat tensor contains this rank's shards."""

    def __init__(self, params: Sequence[nn.Parameter], axis: Axis) -> None:
        """`params` are whole."""
        self.params, self._world, self.trained = list(params), axis.size, params[0].requires_grad
        self._wholes = [tuple(param.shape) for param in params]
        self._widths = [-(-shape[0] // axis.size) * _numel(shape[1:]) for shape in self._wholes]
        self._offsets = [0, *accumulate(self._widths)]
        self.shares = [
            TensorShard(shape, ((0, (even_ranges(shape[0], axis.size)[axis.rank],)),)) for shape in self._wholes
        ]
        self.mine = self.packed([param.detach() for param in params]).view(axis.size, -1)[axis.rank].clone()
        self._parts = self.parts_of(self.mine)

    def packed(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Whole tensors, shaped like the parameters, as one flat tensor, rank by rank; zeros for missing ones."""
        flat = self.params[0].new_zeros(self._world, self._offsets[-1])
        for tensor, offset, width in zip(tensors, self._offsets, self._widths, strict=False):
            if tensor is not None:
                for row, part in zip(flat, torch.split(tensor.reshape(-1), max(width, 1)), strict=False):
                    row[offset : offset + len(part)].copy_(part)
        return flat.view(-1)

    def parts_of(self, flat: Tensor) -> list[Tensor]:
        """Views of each parameter's shard in one rank's flat tensor."""
        return [
            flat[offset : offset + _numel(share.local_shape)].view(share.local_shape)
            for offset, share in zip(self._offsets, self.shares, strict=False)
        ]

    def gather(self, axis: Axis) -> None:
        rows = axis.all_gather(self.mine, "whole weights")
        for param, shape, offset, width in zip(self.params, self._wholes, self._offsets, self._widths, strict=False):
            param.data = rows[:, offset : offset + width].reshape(-1)[: _numel(shape)].view(shape)

    def cut(self, axis: Axis) -> None:
        """Take this rank's shards of the parameters, which are whole."""
        self.mine.copy_(self.packed([param.detach() for param in self.params]).view(axis.size, -1)[axis.rank])

    def rest(self) -> None:
        for param, part in zip(self.params, self._parts, strict=True):
            param.data = part


def _take(node: Gradients, members: range) -> Gradients:
    """Remove these gradients from the node, so that each is freed once it is packed."""
    found = node[members.start : members.stop]
    node[members.start : members.stop] = [None] * len(members)
    return found


def _bucketed(params: Sequence[nn.Parameter], num_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Buckets of about `num_bytes`, in order, of parameters of the same dtype and device, all trained or all frozen."""
    pending: dict[Any, list[nn.Parameter]] = {}
    for param in params:
        bucket = pending.setdefault((param.dtype, param.device, param.requires_grad), [])
        bucket.append(param)
        if sum(one.nbytes for one in bucket) >= num_bytes:
            yield pending.pop((param.dtype, param.device, param.requires_grad))
    yield from pending.values()


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
