"""The gradient of a matrix that few rows went through, as the two matrices that it is the product of.

In `linear(x, W)` the gradient of W is the product of the output's gradient and x: rows x (outputs + inputs) numbers
tell all of outputs x inputs. A worker that is to hand a gradient over, not to use it, leaves the product to whoever
does, which makes it block by block on its way into new weights: nowhere is a gradient as long as the weights.
Start reading at `Factoring`, which takes factors from a backward pass, and `blocks_of`, for those who use them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["Block", "Factor", "Factoring", "blocks_of", "fits", "product", "read", "write"]

# A smaller gradient is in a cache anyway.
LEAST_BYTES = 2**18
# Factors have to be shorter than the gradient by so much for the product to be worth the trouble.
TIMES_SHORTER = 2
_LINE = 16


class Factor(NamedTuple):
    """The gradient is `outputs.T @ inputs`; both have a row for every row that went through the matrix."""

    outputs: Tensor
    inputs: Tensor


class Factoring(TorchFunctionMode):
    """Around the forward of a slice; then `backward`, and `take` what came of it.

    Promises: what it does not take is in `.grad` as always, and both together are the gradient, also of a matrix that
    is used several times, or in other ways as well, or in a backward pass inside the loss.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._params = {id(param): param for param in params if _is_candidate(param)}
        self._taken: dict[int, list[Factor]] = {}
        self._is_taking = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.linear and not torch.compiler.is_compiling():
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._params.get(id(weight)) is not weight or not _is_plain(input, weight):
            return functional.linear(input, weight, bias)
        result: Tensor = _Linear.apply(input, weight, bias, partial(self._offer, id(weight)))  # type: ignore[no-untyped-call]
        return result

    def _offer(self, param: int, factor: Factor) -> bool:
        if self._is_taking:
            self._taken.setdefault(param, []).append(factor)
        return self._is_taking

    def backward(self, loss: Tensor) -> None:
        """Where it computes a forward once more, as with checkpoints of activations, that is the same as the first."""
        edge, one = get_gradient_edge(loss), torch.ones_like(loss)
        self._is_taking = True
        try:
            with self:  # which would be off inside `loss.backward()`, but is not where an edge is given
                torch.autograd.backward(edge, one)
        finally:
            self._is_taking = False

    def take(self, param: Tensor) -> list[Factor]:
        """What this parameter has beside its `.grad`, since it was last asked for."""
        return self._taken.pop(id(param), [])

    def forget(self) -> None:
        self._taken.clear()


def _is_candidate(param: Tensor) -> bool:
    return param.dim() == 2 and param.is_contiguous() and param.dtype == torch.float32 and param.nbytes >= LEAST_BYTES


def _is_plain(input: Tensor, weight: Tensor) -> bool:
    """Nobody else wants to see this gradient, and it is as it seems."""
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and not weight._backward_hooks
        and type(input) is Tensor
        and input.dtype == weight.dtype
        and input.dim() >= 2
        and 0 < input.numel() // weight.shape[1] <= most_rows(weight)
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
    )


def most_rows(weight: Tensor) -> int:
    outputs, inputs = weight.shape
    return outputs * inputs // (TIMES_SHORTER * (outputs + inputs))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, offer: Any) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.offer = offer
        return functional.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        (grad,) = grads
        outputs, inputs = grad.reshape(-1, weight.shape[0]), input.reshape(-1, weight.shape[1])
        of_input, of_weight, of_bias, _ = ctx.needs_input_grad
        taken = of_weight and ctx.offer(Factor(outputs.detach(), inputs.detach()))
        return (
            grad @ weight if of_input else None,
            outputs.t() @ inputs if of_weight and not taken else None,
            outputs.sum(0) if of_bias else None,
            None,
        )


# ---- in memory, in the place of the gradient ----


def fits(weight: Tensor, num_rows: int) -> bool:
    """Whether factors of so many rows have room where the weight's gradient has."""
    return weight.dim() == 2 and 0 < num_rows * sum(weight.shape) <= weight.numel()


def write(view: Tensor, factors: Sequence[Factor]) -> int:
    """Put them where the gradient would be; how many rows they have."""
    num_rows = sum(len(one.outputs) for one in factors)
    outputs, inputs = read(view, num_rows)
    torch.cat([one.outputs for one in factors], out=outputs)
    torch.cat([one.inputs for one in factors], out=inputs)
    return num_rows


def read(view: Tensor, num_rows: int) -> Factor:
    outputs, inputs = view.shape
    flat, middle = view.view(-1), num_rows * outputs
    return Factor(
        flat[:middle].view(num_rows, outputs), flat[middle : middle + num_rows * inputs].view(num_rows, inputs)
    )


# ---- the product, block by block ----


class Block(NamedTuple):
    """Elements from `start` to `stop` of a matrix lie in these rows of it."""

    start: int
    stop: int
    first_row: int
    last_row: int


def blocks_of(start: int, stop: int, width: int, numel: int) -> Iterator[Block]:
    """A stretch of a matrix of this width in blocks of whole rows, `numel` elements or so; cut at cache lines."""
    lines = _LINE // gcd(width, _LINE)
    rows = max(1, numel // width // lines) * lines
    first = start // width // rows * rows
    while max(start, first * width) < stop:
        low, high = max(start, first * width), min(stop, (first + rows) * width)
        yield Block(low, high, low // width, -(-high // width))
        first += rows


def product(factor: Factor, block: Block, room: Tensor) -> tuple[Tensor, int]:
    """Make this block of the gradient, in `room` if it is long enough: where it was made, and the block's address."""
    width, (_, _, first, last) = factor.inputs.shape[1], block
    if room.numel() < (last - first) * width:
        room = torch.empty((last - first) * width)
    made = room[: (last - first) * width].view(last - first, width)
    torch.mm(factor.outputs[:, first:last].t(), factor.inputs, out=made)
    return room, made.data_ptr() + 4 * (block.start - first * width)
