"""Parameters that are divided over ranks between steps, and whole within them, with plain collectives of our own.

Where forward passes of several slices are under way at a time, as in a pipeline, blocks cannot come and go with the
passes. So a step begins with whole parameters and ends with each rank's part of their gradients; the optimizer sees
parts only. Parameters stay the user's own objects, and are cut along their first dim as `fsdp_backend` cuts them.
Start reading at `WholeInSteps.divide`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.comm.axis import Axis
from manyhands.parallel.gradients.network_sum import Gradients, add_lists, take
from manyhands.parallel.gradients.reduce_scatter_sum import ShardedSum
from manyhands.parallel.gradients.slice_tree import Stack
from manyhands.parallel.model.tensor_shard import Share, even_ranges
from manyhands.parallel.sharding.sharded_update import ShardedUpdate, check_dividable, cut_states_, stays_whole
from manyhands.parallel.weights.replica_backend import Holding

__all__ = ["WholeInSteps"]


class WholeInSteps(Holding):
    """Of one model and its optimizer. Frozen parameters are divided, too, unless they are small."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        axis: Axis,
        network: Callable[[], Axis],
        *,
        bucket_bytes: int,
        tell: Callable[[str], None],
    ) -> None:
        super().__init__(
            model, optimizer, axis, None, network, None, bucket_bytes=bucket_bytes, check_every=0, tell=tell
        )
        self._buckets: list[_Bucket] = []

    @property
    def shares(self) -> dict[int, Share]:
        """Which part of each parameter this rank has, by the parameter's id; those that are not there are whole."""
        return {id(param): share for one in self._buckets for param, share in zip(one.params, one.shares, strict=True)}

    @property
    def divided_frozen(self) -> tuple[Tensor, ...]:
        return tuple(param for bucket in self._buckets for param in bucket.params if not bucket.trained)

    def divide(self) -> None:
        """Give each rank its part. All ranks have the same values before; once it is done it stays so."""
        if self._buckets:
            return
        check_dividable(self._model, self._optimizer)
        params = [param for param in self._model.parameters() if not stays_whole(param)]
        self._buckets = [_Bucket(some, self._axis) for some in _together(params, self._bucket_bytes)]
        cut_states_(self._optimizer, self.shares)
        self.rest()
        trained = [bucket for bucket in self._buckets if bucket.trained]
        self.sum = ScatteredSum(trained, self._axis, self._network)
        self.weights = ShardedUpdate(self.sum, self._optimizer, self._axis)

    def before_step(self) -> None:
        """Have all parameters whole. For all ranks alike."""
        for bucket in self._buckets:
            bucket.gather(self._axis)

    def before_pass(self) -> None:
        """Nothing comes or goes with a pass."""

    def rest(self) -> None:
        """Parameters are this rank's parts again."""
        for bucket in self._buckets:
            bucket.rest()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, parameters are whole, and ranks may run as many forward passes as they like."""
        self.before_step()
        try:
            yield
        finally:
            self.rest()

    def regroup(self, axis: Axis, sharing: Any) -> None:
        raise AssertionError("workers with parts of a model do not come and go")


class ScatteredSum(ShardedSum):
    """Of every slice's whole gradients each rank gets its part of the sum, once per step and along the slice tree."""

    def __init__(self, buckets: Sequence[_Bucket], axis: Axis, network: Callable[[], Axis]) -> None:
        super().__init__([param for bucket in buckets for param in bucket.params], axis, network)
        self._buckets = buckets

    def begin(self, count: int, shares: Sequence[range], name: str) -> None:
        super().begin(count, shares, name)
        self._stack: Stack[Gradients] = Stack(count, add=add_lists)

    passes_left = 0  # each rank makes its own, and no more

    def before_backward(self, v: int | None) -> None: ...

    def after_backward(self, v: int | None) -> None:
        assert v is not None
        self._stack.push(v, [take(param) for param in self.params])

    def finish(self) -> None:
        """Leave this rank's part of the sum over all slices in `.grad`, None where no slice of any rank had one."""
        nodes, first = list(self._stack.values()), 0
        self._stack.clear()
        self.used = {place for node in nodes for place, grad in enumerate(node) if grad is not None}
        for bucket in self._buckets:
            places = range(first, first := first + len(bucket.params))
            held = [bucket.packed(_taken(node, places)) for node in nodes] or [bucket.packed([None] * len(places))]
            self.bytes_sent += sum(one.nbytes for one in held)
            total = torch.empty_like(bucket.mine)
            self.exchange(total, held, f"gradients of {self._name}")()
            for param, part in zip(bucket.params, bucket.parts_of(total), strict=True):
                param.grad = part
        self._tell_used()


class _Bucket:
    """Parameters of one kind, whose parts travel together: this rank's lie in one flat tensor, one after the other."""

    def __init__(self, params: Sequence[nn.Parameter], axis: Axis) -> None:
        """Parameters are whole now."""
        self.params, self._world, self.trained = list(params), axis.size, params[0].requires_grad
        self._wholes = [tuple(param.shape) for param in params]
        self._widths = [-(-shape[0] // axis.size) * _numel(shape[1:]) for shape in self._wholes]
        self._offsets = [0, *accumulate(self._widths)]
        self.shares = [Share(shape, ((0, (even_ranges(shape[0], axis.size)[axis.rank],)),)) for shape in self._wholes]
        self.mine = self.packed([param.detach() for param in params]).view(axis.size, -1)[axis.rank].clone()
        self._parts = self.parts_of(self.mine)

    def packed(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Whole tensors like the parameters, a part for every rank, one after the other; zeros for those missing."""
        flat = self.params[0].new_zeros(self._world, self._offsets[-1])
        for tensor, offset, width in zip(tensors, self._offsets, self._widths, strict=False):
            if tensor is not None:
                for row, part in zip(flat, torch.split(tensor.reshape(-1), max(width, 1)), strict=False):
                    row[offset : offset + len(part)].copy_(part)
        return flat.view(-1)

    def parts_of(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part in a rank's row."""
        return [
            flat[offset : offset + _numel(share.local_shape)].view(share.local_shape)
            for offset, share in zip(self._offsets, self.shares, strict=False)
        ]

    def gather(self, axis: Axis) -> None:
        flat = self.mine.new_empty(self._world * len(self.mine))
        axis.all_gather_start(flat, self.mine, "whole weights").wait()
        rows = flat.view(self._world, -1)
        for param, shape, offset, width in zip(self.params, self._wholes, self._offsets, self._widths, strict=False):
            param.data = rows[:, offset : offset + width].reshape(-1)[: _numel(shape)].view(shape)

    def rest(self) -> None:
        for param, part in zip(self.params, self._parts, strict=True):
            param.data = part


def _taken(node: Gradients, places: range) -> Gradients:
    """Out of the node, so that each is let go of when it has been packed."""
    found = [node[place] for place in places]
    for place in places:
        node[place] = None
    return found


def _together(params: Sequence[nn.Parameter], num_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Those of one type that are trained, or not, in their order, some at a time: as many as so many bytes hold."""
    kinds: dict[Any, list[nn.Parameter]] = {}
    for param in params:
        some = kinds.setdefault((param.dtype, param.device, param.requires_grad), [])
        some.append(param)
        if sum(one.nbytes for one in some) >= num_bytes:
            yield kinds.pop((param.dtype, param.device, param.requires_grad))
    yield from kinds.values()


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
