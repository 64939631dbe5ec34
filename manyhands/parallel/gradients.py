"""The gradient of the whole batch: every slice's gradient, summed along the slice tree, over all ranks.

One object lives as long as the model. Per step: `begin`, then for each of this rank's slices `before_backward` and
`after_backward`, then `finish`, which leaves the sums in `.grad`. Weights are the caller's business: what backward
produces is what is summed.

On one rank the fresh gradients that autograd left in `.grad` are taken as they are and added up. With several, the
gradients of the rank's last slice are copied into buckets by hooks while backward still runs, and each full bucket
starts travelling at once. A parameter without a gradient anywhere keeps `.grad` None: each bucket carries a count per
parameter beside the sums. Start reading at `GradientSum`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from manyhands.comm.axis import Axis, Pending
from manyhands.errors import TrainingFailed
from manyhands.parallel.tree import Node, Stack, finish, nodes_of

__all__ = ["GradientSum"]

Gradients = list[Tensor | None]
# The first bucket is small so that something travels early; the rest are as large as asked.
FIRST_BUCKET_BYTES = 2**20


class GradientSum:
    """Sums per-slice gradients of `params` over `axis`; the same bits for every division of the slices over ranks."""

    def __init__(self, params: Sequence[nn.Parameter], axis: Axis, bucket_bytes: int) -> None:
        self.params, self._axis, self._bucket_bytes = list(params), axis, bucket_bytes
        self._buckets: list[_Bucket] = []
        self._place: dict[int, tuple[_Bucket, int]] = {}
        self._arrival: list[int] = []
        self._settled = False
        self._shares: Sequence[range] | None = None
        self._overlapping = False
        self.bytes_sent = 0
        self._hooks: list[RemovableHandle] = []
        if axis.size > 1:
            self._hooks = [
                param.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
                for index, param in enumerate(self.params)
            ]

    def begin(self, count: int, shares: Sequence[range], name: str) -> None:
        """Start a step of `count` slices, of which rank r computes `shares[r]`."""
        self._count, self._name = count, name
        self._mine = shares[self._axis.rank]
        self._stack: Stack[Gradients] = Stack(count, add=_add_lists)
        self._summed = False
        self._drop()
        if self._axis.size > 1:
            if not self._buckets:
                self._make_buckets(range(len(self.params) - 1, -1, -1))
            if shares is not self._shares:
                self._shares, self._nodes = shares, [nodes_of(share, count) for share in shares]
            for bucket in self._buckets:
                bucket.begin(self._nodes, self._count)
            self._launched = 0
            self.bytes_sent = 0

    def before_backward(self, v: int) -> None:
        """Backward of slice `v` comes next; slices come in ascending order."""
        self._overlapping = self._axis.size > 1 and v == self._mine[-1]
        if self._overlapping:
            self._below = list(self._stack.values())
            held = len(self._below)
            self._merges = held - (len(self._nodes[self._axis.rank]) - 1)

    def after_backward(self, v: int) -> None:
        if self._overlapping:
            self._overlapping = False
            for index, param in enumerate(self.params):
                bucket, place = self._place[index]
                if not bucket.arrived[place]:  # unused by this slice; earlier ones may have used it
                    self._deliver(index, _take(param))
            self._launch()
        elif self._axis.size == 1 and self._count == 1:
            self._summed = True  # nothing to add: the sum is where autograd put it
        else:
            self._stack.push(v, [_take(param) for param in self.params])

    def finish(self) -> None:
        """Leave the sum over all slices in `.grad` on every rank, None where no slice had a gradient."""
        if self._axis.size == 1:
            if not self._summed:
                total: Gradients = finish(self._stack, self._count, _add_lists)
                for param, grad in zip(self.params, total, strict=True):
                    param.grad = grad
            return
        self._launch(everything=True)
        for bucket in self._buckets:
            bucket.collect(self._axis, f"gradients of {self._name}")
        for index, param in enumerate(self.params):
            bucket, place = self._place[index]
            param.grad = bucket.result(place)
        self._settle_order()

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def _drop(self) -> None:
        for param in self.params:
            param.grad = None

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def arrived(param: Tensor) -> None:
            if self._overlapping:
                self._deliver(index, _take(param))
                self._launch()

        return arrived

    def _deliver(self, index: int, grad: Tensor | None) -> None:
        """Fold the last slice's gradient of one parameter into its node, and put all nodes into the bucket."""
        bucket, place = self._place[index]
        if bucket.arrived[place]:
            # A parameter used in two re-entrant checkpointed segments gets its gradient in two instalments.
            bucket.add_again(place, grad)
            return
        held = [below[index] for below in self._below]
        for _ in range(self._merges):
            grad = _add(held.pop(), grad)
        bucket.put(place, [*held, grad])
        if not self._settled:
            self._arrival.append(index)

    def _launch(self, everything: bool = False) -> None:
        # Strictly in order: every rank must start the same collectives in the same sequence, whatever arrived first.
        while self._launched < len(self._buckets):
            bucket = self._buckets[self._launched]
            if bucket.missing and not everything:
                return
            bucket.start(self._axis, f"gradients of {self._name}")
            self.bytes_sent += bucket.num_bytes
            self._launched += 1

    def _make_buckets(self, order: Sequence[int]) -> None:
        self._buckets, self._place = [], {}
        open_ones: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        for index in order:
            param = self.params[index]
            kind = (param.dtype, param.device)
            open_ones.setdefault(kind, []).append(index)
            sizes[kind] = sizes.get(kind, 0) + param.numel() * param.element_size()
            if sizes[kind] >= (self._bucket_bytes if self._buckets else min(self._bucket_bytes, FIRST_BUCKET_BYTES)):
                self._close_bucket(open_ones.pop(kind))
                sizes[kind] = 0
        for members in open_ones.values():
            self._close_bucket(members)

    def _close_bucket(self, members: list[int]) -> None:
        bucket = _Bucket([self.params[index] for index in members], self._axis.rank, self._axis.size)
        self._buckets.append(bucket)
        self._place.update({index: (bucket, place) for place, index in enumerate(members)})

    def _settle_order(self) -> None:
        """After the first step, rebuild the buckets in the order in which rank 0's gradients arrived."""
        if self._settled:
            return
        self._settled = True
        seen = set(self._arrival)
        rest = [index for index in range(len(self.params)) if index not in seen]
        agreed = torch.tensor(self._arrival + rest, dtype=torch.int64)
        self._axis.broadcast_([agreed], "order of gradients")
        kept = [param.grad.clone() if param.grad is not None else None for param in self.params]
        self._make_buckets(agreed.tolist())
        for param, grad in zip(self.params, kept, strict=True):
            param.grad = grad


class _Bucket:
    """Some parameters' gradients in one flat tensor, one row per node that this rank holds, counts at the end."""

    def __init__(self, params: Sequence[nn.Parameter], rank: int, world: int) -> None:
        self._rank = rank
        self._shapes = [param.shape for param in params]
        self._starts = [0]
        for param in params:
            self._starts.append(self._starts[-1] + param.numel())
        self._used = self._starts[-1] + len(params)
        self._part = -(-self._used // world)
        self._world, self._length = world, self._part * world
        self._like = params[0]
        self._sum = self._fresh(1)
        self.num_bytes = self._length * self._like.element_size()

    def begin(self, nodes: Sequence[Sequence[Node]], count: int) -> None:
        self._nodes, self._count = nodes, count
        self._pending: Pending | None = None
        # a + b is the same either way round: with two ranks that hold one node each, the backend's sum is the tree's.
        self._direct = self._world == 2 and all(len(held) == 1 for held in nodes)
        self.arrived = [False] * len(self._shapes)
        self.missing = len(self._shapes)

    def put(self, place: int, values: Sequence[Tensor | None]) -> None:
        rows = self._rows(len(values))
        start, stop = self._starts[place], self._starts[place + 1]
        for row, value in zip(rows, values, strict=True):
            if value is None:
                row[start:stop].zero_()
            else:
                row[start:stop].copy_(value.reshape(-1))
            row[self._starts[-1] + place] = 0 if value is None else 1
        self.arrived[place] = True
        self.missing -= 1

    def add_again(self, place: int, value: Tensor | None) -> None:
        if self._pending is not None:
            raise TrainingFailed(
                "A parameter received gradients twice in one backward pass, the second after its sum was under way.",
                fix=["torch.utils.checkpoint(..., use_reentrant=False)"],
            )
        if value is not None:
            row = self._rows(len(self._nodes[self._rank]))[-1]
            row[self._starts[place] : self._starts[place + 1]].add_(value.reshape(-1))

    def start(self, axis: Axis, name: str) -> None:
        mine = len(self._nodes[self._rank])
        if self._direct:
            self._pending = axis.sum_start(self._sum[0], name)
            return
        # Rank j finishes part j: it gets that part of every node of every rank.
        sent = self._rows(mine).view(mine, self._world, self._part).transpose(0, 1).contiguous() if mine else None
        outgoing = sent.view(-1) if sent is not None else self._sum.new_empty(0)
        sizes = [len(held) * self._part for held in self._nodes]
        self._incoming = self._sum.new_empty(sum(sizes))
        self._outgoing = outgoing  # the operation reads it until it is waited for
        self._pending = axis.all_to_all_start(self._incoming, outgoing, sizes, [mine * self._part] * self._world, name)

    def collect(self, axis: Axis, name: str) -> None:
        assert self._pending is not None
        self._pending.wait()
        if self._direct:
            return
        partials: dict[Node, Tensor] = {}
        start = 0
        for held in self._nodes:
            for node in held:
                partials[node] = self._incoming[start : start + self._part]
                start += self._part
        part = finish(partials, self._count, add=lambda left, right: left.add_(right))
        # The sum's own memory is where the rows to send were put together; they have been sent by now.
        axis.all_gather_start(self._sum[0], part.clone(), f"{name} (gather)").wait()

    def result(self, place: int) -> Tensor | None:
        flat = self._sum[0]
        if not flat[self._starts[-1] + place]:
            return None
        return flat[self._starts[place] : self._starts[place + 1]].view(self._shapes[place])

    def _rows(self, count: int) -> Tensor:
        if count > len(self._sum):
            self._sum = self._fresh(count)
        return self._sum[:count]

    def _fresh(self, rows: int) -> Tensor:
        return torch.zeros(rows, self._length, dtype=self._like.dtype, device=self._like.device)


def _take(param: Tensor) -> Tensor | None:
    grad, param.grad = param.grad, None
    return grad.to_dense() if grad is not None and grad.is_sparse else grad


def _add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left.add_(right)


def _add_lists(left: Gradients, right: Gradients) -> Gradients:
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]
