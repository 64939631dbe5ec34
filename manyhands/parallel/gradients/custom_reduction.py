"""A user function that combines the gradients of the slices, in place of their sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from manyhands.comm.axis import Axis
from manyhands.errors import TrainingFailed
from manyhands.parallel.gradients.gradient_lists import Gradients, take
from manyhands.parallel.gradients.network_sum import GradientSum

__all__ = ["CustomReduction", "Reduction"]

Reduction = Callable[[list[Tensor]], Tensor]
"""One parameter's gradients, one for each slice that has one, in slice order -> the gradient for the optimizer.

The gradients are weighted: their sum is the gradient of the batch's mean loss.
"""


class CustomReduction(GradientSum):
    """Keeps every slice's gradients until the step ends. For one rank, which has all slices."""

    def __init__(self, params: Sequence[nn.Parameter], axis: Axis, reduce: Reduction) -> None:
        assert axis.size == 1, "with several replicas no rank has all slices"
        super().__init__(params, axis, 0)
        self._reduce = reduce
        self._slices: list[Gradients] = []

    def begin(self, count: int, shares: Sequence[range], name: str) -> None:
        super().begin(count, shares, name)
        self._slices = []

    def after_backward(self, v: int) -> None:
        self._slices.append([take(param) for param in self.params])

    def finish(self) -> None:
        for number, param in enumerate(self.params):
            grads = [one for one in (each[number] for each in self._slices) if one is not None]
            param.grad = _checked(self._reduce(grads), param) if grads else None
        self._slices = []


def _checked(found: Tensor, param: nn.Parameter) -> Tensor:
    if not isinstance(found, Tensor) or found.shape != param.shape:
        raise TrainingFailed(
            f"reducer returned {tuple(getattr(found, 'shape', ()))} for a parameter of {tuple(param.shape)}.",
            fix=["reducer=lambda gradients: torch.stack(gradients).sum(0)"],
        )
    return found.to(param.dtype)
