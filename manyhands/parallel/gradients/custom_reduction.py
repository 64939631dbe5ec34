"""A user's reduction, which combines the gradients of the slices in place of their sum.

A function is called for each parameter (`reducer=`); an optimizer with a method `reduce_grad` is called once per step
for all of them. With several ranks, each gathers every slice's gradients, and calls the reduction with the same lists:
the result does not depend on who computed what, and is the same on all ranks. Start reading at `CustomReduction`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.comm.axis import Axis
from manyhands.comm.peer_waits import Waiting
from manyhands.errors import TrainingFailed
from manyhands.parallel.gradients.gradient_lists import Gradients, take
from manyhands.parallel.gradients.interface import Sum

__all__ = ["CustomReduction", "Reduction", "combined", "has_reduce_grad", "own_reduction", "per_parameter"]

Reduction = Callable[[list[list[Tensor]]], Sequence[Tensor]]
"""For each parameter its gradients, one for each slice that has one, in slice order -> the gradients for the optimizer.

The gradients are weighted: their sum is the gradient of the batch's mean loss. Parameters without any are left out.
"""


def per_parameter(reducer: Callable[[list[Tensor]], Tensor]) -> Reduction:
    return lambda gradients: [reducer(one) for one in gradients]


def has_reduce_grad(optimizer: Any) -> bool:
    return callable(getattr(optimizer, "reduce_grad", None))


def own_reduction(reducer: Callable[[list[Tensor]], Tensor] | None, optimizer: Any) -> Reduction | None:
    """The user's reduction: `reducer`, a strategy's function, or the optimizer's `reduce_grad`; None: there is none."""
    if reducer is not None:
        return per_parameter(reducer)
    return optimizer.reduce_grad if has_reduce_grad(optimizer) else None


def combined(reduce: Reduction, lists: Sequence[list[Tensor]], params: Sequence[Tensor]) -> list[Tensor | None]:
    """For each parameter what the user's reduction makes of its list of gradients; None where the list is empty."""
    with torch.no_grad():
        found = list(reduce([grads for grads in lists if grads]))
    expected = sum(map(bool, lists))
    if len(found) != expected:
        raise TrainingFailed(
            f"reduce_grad returned {len(found)} gradients for {expected} parameters.",
            fix=["return [torch.stack(one).sum(0) for one in gradients]"],
        )
    each = iter(found)
    return [_checked(next(each), param) if grads else None for grads, param in zip(lists, params, strict=True)]


class CustomReduction(Sum):
    """Keeps every slice's gradients until the step ends.

    Costs, with several ranks: each rank sends the gradients of each of its slices to all others.
    """

    def __init__(self, params: Sequence[nn.Parameter], axis: Axis, reduce: Reduction) -> None:
        self.params, self._axis, self._reduce = list(params), axis, reduce
        self._slices: list[Gradients] = []
        self.bytes_sent = 0

    @property
    def waits(self) -> list[Waiting]:
        return [self._axis.waiting]

    def begin(self, count: int, shares: Sequence[range], name: str) -> None:
        self._shares, self._name, self._slices, self.bytes_sent = shares, name, [], 0
        for param in self.params:
            param.grad = None

    def before_backward(self, v: int) -> None:
        pass

    def after_backward(self, v: int) -> None:
        self._slices.append([take(param) for param in self.params])

    def finish(self) -> None:
        every = self._gathered() if self._axis.size > 1 else self._slices
        lists = [
            [one for one in (each[index] for each in every) if one is not None] for index in range(len(self.params))
        ]
        self._slices = []
        for param, grad in zip(self.params, combined(self._reduce, lists, self.params), strict=True):
            if grad is not None:
                param.grad = grad

    def _gathered(self) -> list[Gradients]:
        """The gradients of every rank's slices, in slice order."""
        most = max(map(len, self._shares))
        present = torch.zeros(most, len(self.params), dtype=torch.uint8)
        for row, grads in enumerate(self._slices):
            present[row] = torch.tensor([grad is not None for grad in grads], dtype=torch.uint8)
        there = self._axis.all_gather(present, f"which gradients of {self._name}").bool()
        every: list[Gradients] = [[None] * len(self.params) for share in self._shares for _ in share]
        for index, param in enumerate(self.params):
            rows = param.new_zeros(most, *param.shape)
            for row, grads in enumerate(self._slices):
                if (grad := grads[index]) is not None:
                    rows[row] = grad
            self.bytes_sent += rows.numel() * rows.element_size()
            gathered = self._axis.all_gather(rows, f"gradients of {self._name}")
            for rank, share in enumerate(self._shares):
                for row, position in enumerate(share):
                    if there[rank, row, index]:
                        every[position][index] = gathered[rank, row]
        return every

    def can_carry(self, num_bytes: int) -> bool:
        return False

    def carry(self, message: bytes) -> None:
        raise AssertionError("can_carry is never true")

    def carried(self) -> list[bytes]:
        raise AssertionError("can_carry is never true")

    def leave(self) -> None:
        pass


def _checked(found: Tensor, param: Tensor) -> Tensor:
    if not isinstance(found, Tensor) or found.shape != param.shape:
        raise TrainingFailed(
            f"reducer returned {tuple(getattr(found, 'shape', ()))} for a parameter of {tuple(param.shape)}.",
            fix=["reducer=lambda gradients: torch.stack(gradients).sum(0)"],
        )
    # A reducer may return one of the gradients, or one tensor for two parameters: the update scales it in place.
    return found.to(param.dtype).clone()
