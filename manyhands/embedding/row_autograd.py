"""Autograd for the rows of a batch's ids: a normal tensor, whose gradient is summed for each different id.

The bits are those of torch's embedding over the rows of the different ids; its backward has a call for each id,
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
    """The result of `take`: a row for each of `inverse`, on the CPU.

    Every backward that reaches it calls `collect` with the gradients of the `count` different rows, each summed in the
    order of appearance.
    """
    anchor = torch.empty(0, requires_grad=True)  # rows are no parameters: this makes autograd call backward
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
