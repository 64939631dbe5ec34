"""The gradient sum over a network.

On one rank the fresh gradients that autograd left in `.grad` are taken as they are and added up. With several, the
gradients of the rank's last slice are copied into buckets while backward still runs: a bucket is sent as soon as all of
its parameters have their gradients. A parameter without a gradient on any rank keeps `.grad` None. With a codec, fp32
gradients are sent in fewer bytes, and rounding errors are kept for the next step (`Residuals`). `bucket_transfers`
sends the buckets. Start reading at `GradientSum`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from manyhands.comm.axis import Axis
from manyhands.comm.codecs import Codec
from manyhands.comm.peer_waits import Waiting
from manyhands.errors import BadLoss, TrainingFailed
from manyhands.parallel.gradients.bucket_transfers import CompressedTransfer, ExactTransfer
from manyhands.parallel.gradients.compressed_all_reduce import most_numel
from manyhands.parallel.gradients.gradient_lists import Gradients, add_lists, take
from manyhands.parallel.gradients.interface import Residuals, Sum
from manyhands.parallel.gradients.slice_tree import Stack, finish, nodes_of

__all__ = ["Bucket", "GradientSum", "total_weight"]

# The first bucket is small so that sending starts early; the rest have the configured size.
FIRST_BUCKET_BYTES = 2**20
# A message takes four times its bytes, on every rank; batch statistics are too large for that.
MAX_CARRIED_BYTES = 1024


class GradientSum(Sum):
    """Sums per-slice gradients of `params` over `axis`; without a codec, bitwise equal for any division of slices."""

    def __init__(
        self, params: Sequence[nn.Parameter], axis: Axis, bucket_bytes: int, codec: Codec | None = None
    ) -> None:
        """The codec applies to fp32 gradients only; others are sent without encoding."""
        self.params, self._axis, self._bucket_bytes, self._codec = list(params), axis, bucket_bytes, codec
        # How many buckets may be in flight to their owners before this rank waits for the first. With a codec, sums are
        # sent back while backward still runs: on a slow link both directions of a bucket overlap with it.
        self._most_under_way = 2 if codec is not None and axis.size > 2 else 2**31
        self._buckets: list[Bucket] = []
        self._hooks: list[RemovableHandle] = []
        self._arrival: list[int] = []
        self._settled = False
        self._shares: Sequence[range] | None = None
        self._overlapping = False
        self._message_bytes = 0
        self._residuals: dict[int, Tensor] = {}  # on one rank, which has no buckets, until the next gradient
        self.bytes_sent = 0
        if axis.size > 1:
            self._make_buckets(range(len(self.params) - 1, -1, -1))
            self._hook({index: self._note_and_launch(index) for index in range(len(self.params))})

    @property
    def waits(self) -> list[Waiting]:
        return [self._axis.waiting]

    def begin(self, count: int, shares: Sequence[range], name: str) -> None:
        self._count, self._name = count, name
        self._mine = shares[self._axis.rank]
        self._stack: Stack[Gradients] = Stack(count, add=add_lists)
        self._summed = False
        for param in self.params:
            param.grad = None
        if self._axis.size > 1:
            if shares is not self._shares:
                self._shares, self._nodes = shares, [nodes_of(share, count) for share in shares]
            self._begin_buckets()
            self._launched = self._gathering = 0
            self.bytes_sent = 0

    def _begin_buckets(self) -> None:
        for bucket in self._buckets:
            bucket.transfer.begin(self._nodes, self._count)

    # ---- small messages that are sent with the gradients ----

    def can_carry(self, num_bytes: int) -> bool:
        """All ranks return the same. A rank without a slice sends no gradients, so it could not send a message."""
        assert self._shares is not None
        if not self._buckets or not all(self._shares) or num_bytes > MAX_CARRIED_BYTES:
            return False
        if num_bytes > self._message_bytes:
            self._message_bytes = num_bytes
            self._make_buckets([index for bucket in self._buckets for index in bucket.indices])
            self._begin_buckets()
        return True

    def carry(self, message: bytes) -> None:
        self._carrier = self._buckets[0].transfer  # remembered, as the first step ends with new buckets
        self._carrier.message = message

    def carried(self) -> list[bytes]:
        return self._carrier.messages()

    # ---- backward ----

    def before_backward(self, v: int) -> None:
        self._overlapping = self._axis.size > 1 and v == self._mine[-1]
        if self._overlapping:
            self._below = list(self._stack.values())
            self._merges = len(self._below) - (len(self._nodes[self._axis.rank]) - 1)

    def after_backward(self, v: int) -> None:
        if self._overlapping:
            self._overlapping = False
            self._check_no_second_gradient()
            self._launch(everything=True)
        elif self._axis.size == 1 and self._count == 1:
            self._summed = True  # nothing to add: the sum is in `.grad` already
        else:
            self._stack.push(v, [take(param) for param in self.params])

    def finish(self) -> None:
        """Leave the sum over all slices in `.grad` on every rank, None where no slice had a gradient."""
        if self._axis.size == 1:
            self._finish_alone()
            return
        self._launch(everything=True)  # a rank without a slice has launched nothing yet
        self._gather(len(self._buckets))
        for bucket in self._buckets:
            bucket.give()
        self._settle_order()

    def _finish_alone(self) -> None:
        if not self._summed:
            total: Gradients = finish(self._stack, self._count, add_lists)
            for param, grad in zip(self.params, total, strict=True):
                param.grad = grad
        for index in list(self._residuals):
            grad = self.params[index].grad
            if grad is not None:
                self.params[index].grad = self._residuals.pop(index) + grad

    def leave(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _launch(self, everything: bool = False) -> None:
        # Strictly in order: every rank must start the same collectives in the same sequence, in any order of arrival.
        while self._launched < len(self._buckets):
            bucket = self._buckets[self._launched]
            if not everything and not bucket.full:
                return
            if self._mine:
                bucket.fill(self._below, self._merges)
            bucket.transfer.send(f"gradients of {self._name}")
            self.bytes_sent += bucket.transfer.num_bytes
            self._launched += 1
            self._gather(self._launched - self._most_under_way)

    def _gather(self, stop: int) -> None:
        """Finish this rank's part of the sums of the buckets before `stop`, and start collecting the others'."""
        while self._gathering < stop:
            self._buckets[self._gathering].transfer.send_sum(f"gradients of {self._name} (gather)")
            self._gathering += 1

    def _check_no_second_gradient(self) -> None:
        """A parameter used in two re-entrant checkpointed segments receives two gradients in one backward pass."""
        if any(param.grad is not None for bucket in self._buckets[: self._launched] for param in bucket.params):
            raise TrainingFailed(
                "A parameter received gradients twice in one backward pass, the second after the first was sent.",
                fix=["torch.utils.checkpoint(..., use_reentrant=False)"],
            )

    def _hook(self, calls: dict[int, Callable[[Tensor], None]]) -> None:
        self.leave()
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

    # ---- buckets ----

    def _make_buckets(self, order: Sequence[int]) -> None:
        """Make new buckets, with the residuals of the previous ones."""
        residuals = self.residuals()
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
        self._set_residuals(residuals)

    def _close_bucket(self, members: list[int]) -> None:
        params = [self.params[index] for index in members]
        transfer: ExactTransfer | CompressedTransfer
        message_bytes = 0 if self._buckets else self._message_bytes  # messages are sent with the first bucket
        if self._codec is None or params[0].dtype != torch.float32:
            transfer = ExactTransfer(params, self._axis, message_bytes)
        else:
            piece_numel = most_numel(self._axis.size, self._bucket_bytes)
            transfer = CompressedTransfer(params, self._axis, message_bytes, self._codec, piece_numel)
        self._buckets.append(Bucket(params, members, transfer))

    def _settle_order(self) -> None:
        """After the first step, rebuild the buckets in the order in which rank 0's gradients arrived."""
        if self._settled:
            return
        seen = dict.fromkeys(self._arrival)  # in order, once each
        rest = [index for index in range(len(self.params)) if index not in seen]
        agreed = torch.tensor([*seen, *rest], dtype=torch.int64)
        self._axis.broadcast_([agreed], "order of gradients")
        self._use_order(agreed.tolist())

    def _use_order(self, order: Sequence[int]) -> None:
        """From now on only the last parameter of each bucket has a hook.

        Calling one for each of many small parameters takes longer than copying them. If another parameter's gradient
        arrives last, the bucket is sent a little later.
        """
        self._settled = True
        self._make_buckets(order)
        self._hook({bucket.indices[-1]: self._launch_if_last for bucket in self._buckets})

    # ---- residuals, where there is a codec ----

    @property
    def coded(self) -> Residuals | None:
        return None if self._codec is None else self

    @property
    def settled_order(self) -> list[int] | None:
        return [index for bucket in self._buckets for index in bucket.indices] if self._settled else None

    def residuals(self) -> dict[int, Tensor]:
        of_buckets = {
            index: residual
            for bucket in self._buckets
            for index, residual in zip(bucket.indices, bucket.transfer.residuals, strict=False)
        }
        return {**self._residuals, **of_buckets}

    def gather_residuals(self) -> dict[int, Tensor]:
        """A row for each rank."""
        gathered = {index: residual.unsqueeze(0) for index, residual in self._residuals.items()}
        for number, bucket in enumerate(self._buckets):
            rows = bucket.transfer.gather_residuals(f"residuals of bucket {number}")
            gathered |= zip(bucket.indices, rows, strict=False)
        return gathered

    def restore(self, order: Sequence[int] | None, rows: Mapping[int, Tensor]) -> None:
        """Of n ranks, rank r has rows r, r + n, ... from now on."""
        if order is not None and self._axis.size > 1:
            self._use_order(order)
        rank, size = self._axis.rank, self._axis.size
        self._set_residuals({index: values[rank::size].sum(0) for index, values in rows.items()})

    def succeed(self, before: Residuals) -> None:
        index_of = {id(param): index for index, param in enumerate(self.params)}
        moved = [index_of.get(id(param)) for param in before.params]
        order = before.settled_order
        if self._axis.size > 1 and order is not None and None not in moved and len(moved) == len(self.params):
            self._use_order([index_of[id(before.params[index])] for index in order])
        found = before.residuals()
        self._set_residuals({new: found[old] for old, new in enumerate(moved) if new is not None and old in found})

    def scale_residuals(self, factor: float) -> None:
        for residual in self.residuals().values():
            residual.mul_(factor)

    def _set_residuals(self, values: Mapping[int, Tensor]) -> None:
        if self._axis.size == 1:
            self._residuals = {index: residual.clone() for index, residual in values.items()}
            return
        mine = self.residuals()
        for index, residual in values.items():
            mine[index].copy_(residual)


class Bucket:
    """Some parameters, whose gradients are sent together."""

    def __init__(
        self, params: Sequence[nn.Parameter], indices: Sequence[int], transfer: ExactTransfer | CompressedTransfer
    ) -> None:
        """`indices` are the indices of the parameters among all that are summed."""
        self.params, self.indices, self.transfer = params, indices, transfer

    @property
    def full(self) -> bool:
        return all(param.grad is not None for param in self.params)

    def fill(self, below: Sequence[Gradients], merges: int) -> None:
        """Take the last slice's gradients and those of the nodes `below`, of which `merges` merge with the slice."""
        grads: Gradients = [take(param) for param in self.params]
        held: list[Gradients] = [[node[index] for index in self.indices] for node in below]
        for _ in range(merges):
            grads = add_lists(held.pop(), grads)
        self.transfer.fill([*held, grads])

    def give(self) -> None:
        """Wait for the whole sum, and set each parameter's `.grad` to a view of its part."""
        present = self.transfer.receive_sum()
        for param, view, there in zip(self.params, self.transfer.views, present, strict=True):
            param.grad = view if there else None


def total_weight(weights: Iterable[float], step: int) -> float:
    """The weight of a step's slices, by which the sum of their losses is divided. `BadLoss` where it is not above 0."""
    weight = sum(weights)
    if weight <= 0:
        raise BadLoss(f"The weights of step {step} sum to {weight:g}; the mean needs them above 0.")
    return weight
