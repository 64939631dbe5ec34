"""Gradients of matrices, computed directly into their destination.

Autograd allocates memory for a gradient, from where it has to be copied. The gradient of the matrix in a `linear` that
few rows went through takes hardly longer to compute than to write: computed in its destination, it is written once.
Start reading at `DirectLinearGradients`.
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

__all__ = ["DirectLinearGradients"]

# With 16 rows saving a copy was a large part of a step, with 128 no difference could be measured.
MOST_ROWS = 64


class DirectLinearGradients(TorchFunctionMode):
    """For these parameters. Per slice: `begin`, the forward inside of it, and `backward`.

    Promises: a gradient that was written to its destination is not in `.grad`; any other is, as always, including
    what is added where a matrix is used in other ways as well.
    """

    def __init__(self, params: Sequence[nn.Parameter], least_bytes: int) -> None:
        super().__init__()
        self._param_index = {id(param): index for index, param in enumerate(params) if _is_eligible(param, least_bytes)}
        self._is_in_backward = False

    def begin(self, views: Sequence[Tensor], written: set[int]) -> None:
        """Gradients go to `views`, one per parameter; `written` collects the indices of those that were written."""
        self._views, self._written = views, written
        self._uses: dict[int, int] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.linear and not torch.compiler.is_compiling():
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        index = self._param_index.get(id(weight))
        if index is None or not _is_plain(input, weight):
            return functional.linear(input, weight, bias)
        if not self._is_in_backward:  # in backward, a forward is recomputed (activation checkpointing)
            self._uses[index] = self._uses.get(index, 0) + 1
        result: Tensor = _Linear.apply(input, weight, bias, partial(self._make, index))  # type: ignore[no-untyped-call]
        return result

    def _make(self, index: int, outputs: Tensor, inputs: Tensor) -> bool:
        """Whether this gradient is in its destination now."""
        if not self._is_in_backward or index in self._written or self._uses.get(index, 0) > 1:
            return False
        torch.mm(outputs.t(), inputs, out=self._views[index])
        self._written.add(index)
        return True

    def backward(self, loss: Tensor) -> None:
        """A forward that is recomputed in it, as with activation checkpointing, must be the same as the first."""
        edge, one = get_gradient_edge(loss), torch.ones_like(loss)
        self._is_in_backward = True
        try:
            with self:  # it would be off inside `loss.backward()`, but is on where an edge is given
                torch.autograd.backward(edge, one)
        finally:
            self._is_in_backward = False


def _is_eligible(param: Tensor, least_bytes: int) -> bool:
    return param.dim() == 2 and param.is_contiguous() and param.nbytes >= least_bytes


def _is_plain(input: Tensor, weight: Tensor) -> bool:
    """No other code reads this gradient, and neither autocast nor a transform changes it."""
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
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, write: Any) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.write = write
        return functional.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        (grad,) = grads
        outputs, inputs = grad.reshape(-1, weight.shape[0]), input.reshape(-1, weight.shape[1])
        of_input, of_weight, of_bias, _ = ctx.needs_input_grad
        is_written = of_weight and ctx.write(outputs.detach(), inputs.detach())
        return (
            grad @ weight if of_input else None,
            outputs.t() @ inputs if of_weight and not is_written else None,
            outputs.sum(0) if of_bias else None,
            None,
        )
