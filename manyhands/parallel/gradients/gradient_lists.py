"""The gradients of one slice, or the sum of several slices, as a list by parameter; None where there is no gradient."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from manyhands.torch_private import foreach_add_, foreach_copy_

__all__ = ["Gradients", "add_lists", "copy_gradients_", "take"]

Gradients = list[Tensor | None]


def take(param: Tensor) -> Tensor | None:
    """Remove the parameter's gradient and return it."""
    grad, param.grad = param.grad, None
    return grad.to_dense() if grad is not None and grad.is_sparse else grad


def add_lists(left: Gradients, right: Gradients) -> Gradients:
    """The sums, in the memory of `left` where both have a gradient."""
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


def copy_gradients_(views: Sequence[Tensor], values: Gradients) -> list[bool]:
    """Copy each value to its view, zeros for None; return which values were not None."""
    present = [value for value in values if value is not None]
    if len(present) == len(views):
        foreach_copy_(views, present)
        return [True] * len(views)
    for view, value in zip(views, values, strict=True):
        view.zero_() if value is None else view.copy_(value)
    return [value is not None for value in values]
