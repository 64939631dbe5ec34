"""Rows of a batch's ids as torch sees them: a tensor like any other, whose gradient is summed for each different id.

The bits are those of torch's own embedding of the different ids' rows; its backward has a call for each id, and
`add_rows` one for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manyhands.embedding.row_table import add_rows

__all__ = ["taken"]


def taken(take: Callable[[], Tensor], inverse: Tensor, count: int, collect: Callable[[Tensor], None]) -> Tensor:
    """What `take` returns: a row for each of `inverse`, on the CPU.

    Every backward that reaches it gives `collect` the gradients of `count` different ones, each in the order of its
    appearance.
    """
    anchor = torch.empty(0, requires_grad=True)  # rows are nobody's parameters: this is what makes torch come by
    found: Tensor = _Taken.apply(anchor, take, inverse, count, collect)  # type: ignore[no-untyped-call]
    return found


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        take: Callable[[], Tensor],
        inverse: Tensor,
        count: int,
        collect: Callable[[Tensor], None],
    ) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.count, ctx.collect = count, collect
        return take()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        (inverse,), (gradient,) = ctx.saved_tensors, gradients
        ctx.collect(add_rows(gradient.detach().reshape(-1, gradient.shape[-1]), inverse, ctx.count))
        return (None,) * 5
