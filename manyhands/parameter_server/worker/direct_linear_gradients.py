"""Gradients of matrices that are computed straight to where they are wanted.

Autograd makes a gradient in memory of its own, from where it has to be copied. The gradient of the matrix in a `linear`
that few rows went through takes hardly longer to compute than to write: computed in its place, it is written once.
Start reading at `Straight`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from manyhands.torch_private import are_transforms_active

__all__ = ["Straight"]

# With 16 rows a copy less is much of a step, with 128 it was nothing that could be measured.
MOST_ROWS = 64


class Straight(TorchFunctionMode):
    """Of these parameters. Per slice: `begin`, the forward inside of it, and `backward`.

    Promises: what is put in its place is not in `.grad`; all else is, as always, also what comes on top where a matrix
    is used in other ways as well.
    """

    def __init__(self, params: Sequence[nn.Parameter], least_bytes: int) -> None:
        super().__init__()
        self._place = {id(param): place for place, param in enumerate(params) if _can_be(param, least_bytes)}
        self._is_putting = False

    def begin(self, views: Sequence[Tensor], put: set[int]) -> None:
        """Gradients go to `views`, one for each parameter; `put` has those that are there, now and later."""
        self._views, self._put = views, put
        self._uses: dict[int, int] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.linear and not torch.compiler.is_compiling():
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        place = self._place.get(id(weight))
        if place is None or not _is_plain(input, weight):
            return functional.linear(input, weight, bias)
        if not self._is_putting:  # else a forward is computed once more, for its backward
            self._uses[place] = self._uses.get(place, 0) + 1
        result: Tensor = _Linear.apply(input, weight, bias, partial(self._make, place))  # type: ignore[no-untyped-call]
        return result

    def _make(self, place: int, outputs: Tensor, inputs: Tensor) -> bool:
        """Whether this gradient is in its place now."""
        if not self._is_putting or place in self._put or self._uses.get(place, 0) > 1:
            return False
        torch.mm(outputs.t(), inputs, out=self._views[place])
        self._put.add(place)
        return True

    def backward(self, loss: Tensor) -> None:
        """Where it computes a forward once more, as with checkpoints of activations, that is the same as the first."""
        edge, one = get_gradient_edge(loss), torch.ones_like(loss)
        self._is_putting = True
        try:
            with self:  # which would be off inside `loss.backward()`, but is not where an edge is given
                torch.autograd.backward(edge, one)
        finally:
            self._is_putting = False


def _can_be(param: Tensor, least_bytes: int) -> bool:
    return param.dim() == 2 and param.is_contiguous() and param.nbytes >= least_bytes


def _is_plain(input: Tensor, weight: Tensor) -> bool:
    """Nobody else wants to see this gradient, and it is as it seems."""
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and not weight._backward_hooks
        and type(input) is Tensor
        and input.dtype == weight.dtype
        and input.dim() >= 2
        and 0 < input.numel() // weight.shape[1] <= MOST_ROWS
        and not torch.is_autocast_enabled("cpu")
        and not are_transforms_active()
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, make: Any) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.make = make
        return functional.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        (grad,) = grads
        outputs, inputs = grad.reshape(-1, weight.shape[0]), input.reshape(-1, weight.shape[1])
        of_input, of_weight, of_bias, _ = ctx.needs_input_grad
        is_made = of_weight and ctx.make(outputs.detach(), inputs.detach())
        return (
            grad @ weight if of_input else None,
            outputs.t() @ inputs if of_weight and not is_made else None,
            outputs.sum(0) if of_bias else None,
            None,
        )
