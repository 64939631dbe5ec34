"""The gradient of the whole batch: every slice's gradient, summed along the slice tree, over all ranks.

One object lives as long as the model. Per step: `begin`, then for each of this rank's slices `before_backward` and
`after_backward`, then `finish`, which leaves the sums in `.grad`. Weights are the caller's business: what backward
produces is what is summed.

On one rank the fresh gradients that autograd left in `.grad` are taken as they are and added up. With several, the
gradients of the rank's last slice are copied into buckets while backward still runs: a bucket starts travelling as
soon as all of its parameters have their gradients. A parameter without a gradient anywhere keeps `.grad` None: each
bucket carries a count per parameter beside the sums. A few bytes of each rank's own may travel along (`carry`): as
numbers from 0 to 255 in a place of their own, which every dtype sums with the other ranks' zeros without rounding.
Start reading at `GradientSum`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from manyhands.comm.axis import Axis
from manyhands.comm.peer_waits import Waiting
from manyhands.errors import BadLoss, TrainingFailed
from manyhands.parallel.gradients.slice_tree import Node, Stack, finish, nodes_of
from manyhands.torch_private import foreach_add_, foreach_copy_

__all__ = ["Bucket", "GradientSum", "Gradients", "add_lists", "copy_gradients_", "take", "total_weight"]

Gradients = list[Tensor | None]
# The first bucket is small so that something travels early; the rest are as large as asked.
FIRST_BUCKET_BYTES = 2**20
# What is carried takes four times its bytes, in every rank's place; batch statistics are too much for that.
MAX_CARRIED_BYTES = 1024


class GradientSum:
    """Sums per-slice gradients of `params` over `axis`; the same bits for every division of the slices over ranks."""

    most_under_way = 2**31
    """How many buckets may be on their way to their owners before the first of them is waited for."""

    def __init__(self, params: Sequence[nn.Parameter], axis: Axis, bucket_bytes: int) -> None:
        self.params, self._axis, self._bucket_bytes = list(params), axis, bucket_bytes
        self._buckets: list[Bucket] = []
        self._hooks: list[RemovableHandle] = []
        self._arrival: list[int] = []
        self._settled = False
        self._shares: Sequence[range] | None = None
        self._overlapping = False
        self._room = 0
        self.bytes_sent = 0
        if axis.size > 1:
            self._make_buckets(range(len(self.params) - 1, -1, -1))
            self._hook({index: self._note_and_launch(index) for index in range(len(self.params))})

    @property
    def waits(self) -> list[Waiting]:
        """Where waiting for other ranks is added up."""
        return [self._axis.waiting]

    def begin(self, count: int, shares: Sequence[range], name: str) -> None:
        """Start a step of `count` slices, of which rank r computes `shares[r]`."""
        self._count, self._name = count, name
        self._mine = shares[self._axis.rank]
        self._stack: Stack[Gradients] = Stack(count, add=add_lists)
        self._summed = False
        for param in self.params:
            param.grad = None
        if self._axis.size > 1:
            if shares is not self._shares:
                self._shares, self._nodes = shares, [nodes_of(share, count) for share in shares]
            for bucket in self._buckets:
                bucket.begin(self._nodes, count)
            self._launched = self._gathering = 0
            self.bytes_sent = 0

    def can_carry(self, num_bytes: int) -> bool:
        """Whether every rank's message of at most so many bytes can travel with this step's gradients.

        Depends on what all ranks know alike. A rank without a slice sends no gradients, so nothing can travel there.
        """
        assert self._shares is not None
        if not self._buckets or not all(self._shares) or num_bytes > MAX_CARRIED_BYTES:
            return False
        if num_bytes > self._room:
            self._room = num_bytes
            self._make_buckets([index for bucket in self._buckets for index in bucket.indices])
            for bucket in self._buckets:
                bucket.begin(self._nodes, self._count)
        return True

    def carry(self, message: bytes) -> None:
        """Send it along; before backward of the rank's last slice."""
        self._carrier = self._buckets[0]  # remembered, as the first step ends with new buckets
        self._carrier.message = message

    def carried(self) -> list[bytes]:
        """Every rank's message, followed by zeros; after `finish`."""
        return self._carrier.messages()

    def before_backward(self, v: int) -> None:
        """Backward of slice `v` comes next; slices come in ascending order."""
        self._overlapping = self._axis.size > 1 and v == self._mine[-1]
        if self._overlapping:
            self._below = list(self._stack.values())
            self._merges = len(self._below) - (len(self._nodes[self._axis.rank]) - 1)

    def after_backward(self, v: int) -> None:
        if self._overlapping:
            self._overlapping = False
            self._check_no_second_instalment()
            self._launch(everything=True)
        elif self._axis.size == 1 and self._count == 1:
            self._summed = True  # nothing to add: the sum is where autograd put it
        else:
            self._stack.push(v, [take(param) for param in self.params])

    def finish(self) -> None:
        """Leave the sum over all slices in `.grad` on every rank, None where no slice had a gradient."""
        if self._axis.size == 1:
            if not self._summed:
                total: Gradients = finish(self._stack, self._count, add_lists)
                for param, grad in zip(self.params, total, strict=True):
                    param.grad = grad
            return
        self._launch(everything=True)  # a rank without a slice has launched nothing yet
        self._gather(len(self._buckets))
        for bucket in self._buckets:
            bucket.give()
        self._settle_order()

    def leave(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()

    close = leave

    def _launch(self, everything: bool = False) -> None:
        # Strictly in order: every rank must start the same collectives in the same sequence, whatever arrived first.
        while self._launched < len(self._buckets):
            bucket = self._buckets[self._launched]
            if not everything and not bucket.full:
                return
            if self._mine:
                bucket.fill(self._below, self._merges)
            bucket.start(self._axis, f"gradients of {self._name}")
            self.bytes_sent += bucket.num_bytes
            self._launched += 1
            self._gather(self._launched - self.most_under_way)

    def _gather(self, stop: int) -> None:
        """Finish this rank's part of the sums of the buckets before `stop`, and start collecting the others'."""
        while self._gathering < stop:
            self._buckets[self._gathering].sum_part(self._axis, f"gradients of {self._name} (gather)")
            self._gathering += 1

    def _check_no_second_instalment(self) -> None:
        """A parameter used in two re-entrant checkpointed segments gets its gradient in two instalments."""
        if any(param.grad is not None for bucket in self._buckets[: self._launched] for param in bucket.params):
            raise TrainingFailed(
                "A parameter received gradients twice in one backward pass, the second after its sum was under way.",
                fix=["torch.utils.checkpoint(..., use_reentrant=False)"],
            )

    def _hook(self, calls: dict[int, Callable[[Tensor], None]]) -> None:
        self.close()
        self._hooks = [
            self.params[index].register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]
            for index, call in calls.items()
        ]

    def _note_and_launch(self, index: int) -> Callable[[Tensor], None]:
        def arrived(param: Tensor) -> None:
            if self._overlapping:
                self._arrival.append(index)
                self._launch()

        return arrived

    def _launch_if_last(self, param: Tensor) -> None:
        if self._overlapping:
            self._launch()

    def _make_buckets(self, order: Sequence[int]) -> None:
        self._buckets = []
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
        room = 0 if self._buckets else self._room
        self._buckets.append(self._new_bucket([self.params[index] for index in members], members, room))

    def _new_bucket(self, params: Sequence[nn.Parameter], indices: Sequence[int], room: int) -> Bucket:
        return _PlainBucket(params, indices, self._axis, room)

    def _settle_order(self) -> None:
        """After the first step, rebuild the buckets in the order in which rank 0's gradients arrived.

        From then on only the last parameter of each bucket has a hook: calling one for each of many small parameters
        takes longer than copying them. Should another one come last, its bucket travels a little later.
        """
        if self._settled:
            return
        self._settled = True
        seen = dict.fromkeys(self._arrival)  # in order, once each
        rest = [index for index in range(len(self.params)) if index not in seen]
        agreed = torch.tensor([*seen, *rest], dtype=torch.int64)
        self._axis.broadcast_([agreed], "order of gradients")
        self._use_order(agreed.tolist())

    def _use_order(self, order: Sequence[int]) -> None:
        self._make_buckets(order)
        self._hook({bucket.indices[-1]: self._launch_if_last for bucket in self._buckets})


class Bucket(ABC):
    """Some parameters, whose gradients travel together. Per step: `begin`, `fill`, `start`, `sum_part`, `give`."""

    num_bytes: int
    """What a rank sends in a step."""

    def __init__(self, params: Sequence[nn.Parameter], indices: Sequence[int], axis: Axis, room: int) -> None:
        self.params, self.indices, self.message = list(params), list(indices), b""
        self._rank, self._world, self._room = axis.rank, axis.size, room

    @property
    def full(self) -> bool:
        return all(param.grad is not None for param in self.params)

    @abstractmethod
    def begin(self, nodes: Sequence[Sequence[Node]], count: int) -> None: ...

    @abstractmethod
    def fill(self, below: Sequence[Gradients], merges: int) -> None:
        """Take the last slice's gradients, beside those of the nodes `below`; `merges` of them complete one another."""

    @abstractmethod
    def start(self, axis: Axis, name: str) -> None: ...

    @abstractmethod
    def sum_part(self, axis: Axis, name: str) -> None:
        """Sum the part that this rank owns, and start collecting the others'."""

    @abstractmethod
    def give(self) -> None:
        """Wait for the whole sum, and let each parameter's `.grad` look at its part."""

    @abstractmethod
    def messages(self) -> list[bytes]:
        """Every rank's `message`, followed by zeros."""

    def _take(self, below: Sequence[Gradients], merges: int) -> list[Gradients]:
        """The gradients of each node that this rank holds, in slice order."""
        grads: Gradients = [take(param) for param in self.params]
        held: list[Gradients] = [[node[index] for index in self.indices] for node in below]
        for _ in range(merges):
            grads = add_lists(held.pop(), grads)
        return [*held, grads]


def copy_gradients_(views: list[Tensor], values: Gradients) -> bool:
    """Each value to its view, zeros where there is none; whether all were there."""
    present = [value for value in values if value is not None]
    if len(present) == len(views):
        foreach_copy_(views, present)
        return True
    for view, value in zip(views, values, strict=True):
        view.zero_() if value is None else view.copy_(value)
    return False


class _PlainBucket(Bucket):
    """The gradients in one flat tensor, a row per node that this rank holds; counts and messages last."""

    def __init__(self, params: Sequence[nn.Parameter], indices: Sequence[int], axis: Axis, room: int) -> None:
        super().__init__(params, indices, axis, room)
        self._part = -(-(sum(param.numel() + 1 for param in params) + self._world * room) // self._world)
        self._length = self._part * self._world
        self.num_bytes = self._length * params[0].element_size()
        self._rows = params[0].new_empty(0, self._length)
        self._make_room(1)

    def begin(self, nodes: Sequence[Sequence[Node]], count: int) -> None:
        self._nodes, self._count = nodes, count
        # a + b is the same either way round: with two ranks that hold one node each, the backend's sum is the tree's.
        self._direct = self._world == 2 and all(len(held) == 1 for held in nodes)

    def fill(self, below: Sequence[Gradients], merges: int) -> None:
        nodes = self._take(below, merges)
        self._make_room(len(nodes))
        for number, values in enumerate(nodes):
            if copy_gradients_(self._views[number], values):
                self._counts[number].fill_(1)
            else:
                self._counts[number].copy_(torch.tensor([value is not None for value in values]))
            if self._room:
                self._carry(number)

    def _carry(self, number: int) -> None:
        places = self._messages[number].zero_()
        if number == 0 and self.message:
            mine = torch.frombuffer(bytearray(self.message), dtype=torch.uint8)
            places[self._rank * self._room :][: len(mine)] = mine
            self.message = b""

    def messages(self) -> list[bytes]:
        data = self._messages[0].to(torch.uint8).cpu().numpy().tobytes()
        return [data[rank * self._room : (rank + 1) * self._room] for rank in range(self._world)]

    def start(self, axis: Axis, name: str) -> None:
        if self._direct:
            self._pending = axis.sum_start(self._rows[0], name)
            return
        # Rank j finishes part j: it gets that part of every node of every rank.
        mine = len(self._nodes[self._rank])
        self._outgoing = self._rows[:mine].view(mine, self._world, self._part).transpose(0, 1).reshape(-1)
        sizes = [len(held) * self._part for held in self._nodes]
        self._incoming = self._rows.new_empty(sum(sizes))
        self._pending = axis.all_to_all_start(
            self._incoming, self._outgoing, sizes, [mine * self._part] * self._world, name
        )

    def sum_part(self, axis: Axis, name: str) -> None:
        if self._direct:
            return
        self._pending.wait()
        partials: dict[Node, Tensor] = {}
        start = 0
        for held in self._nodes:
            for node in held:
                partials[node] = self._incoming[start : start + self._part]
                start += self._part
        self._outgoing = finish(partials, self._count, add=lambda left, right: left.add_(right))
        # The sum's own memory is where the rows to send were put together; they have been sent by now.
        self._pending = axis.all_gather_start(self._rows[0], self._outgoing, name)

    def give(self) -> None:
        self._pending.wait()
        for param, view, count in zip(self.params, self._views[0], self._counts[0].tolist(), strict=True):
            param.grad = view if count else None

    def _make_room(self, num_rows: int) -> None:
        if num_rows <= len(self._rows):
            return
        self._rows = torch.zeros(num_rows, self._length, dtype=self.params[0].dtype, device=self.params[0].device)
        sizes = [param.numel() for param in self.params]
        used = [*sizes, len(sizes), self._world * self._room]
        pieces = [row.split([*used, self._length - sum(used)]) for row in self._rows]
        self._views = [[piece.view_as(param) for piece, param in zip(row, self.params, strict=False)] for row in pieces]
        self._counts = [row[len(sizes)] for row in pieces]
        self._messages = [row[len(sizes) + 1] for row in pieces]


def take(param: Tensor) -> Tensor | None:
    grad, param.grad = param.grad, None
    return grad.to_dense() if grad is not None and grad.is_sparse else grad


def add_lists(left: Gradients, right: Gradients) -> Gradients:
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


def total_weight(weights: Iterable[float], step: int) -> float:
    """Of a step's slices: what the sum of their losses is divided by. `BadLoss` where that is nothing."""
    weight = sum(weights)
    if weight <= 0:
        raise BadLoss(f"The weights of step {step} sum to {weight:g}; the mean needs them above 0.")
    return weight
