"""Converts torch losses given as `loss=`, such as `nn.MSELoss()`, to functions of (model, batch).

A batch is then (inputs, targets). The result is the same as torch's on the whole batch, also when it is cut into
slices: with `ignore_index` or class weights the mean is not one over examples, so these return a sum and its weight.
Start reading at `as_loss_function`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from manyhands.errors import BadLoss, SpecError

__all__ = ["as_loss_function"]

TORCH_LOSS: type[Any] = nn.L1Loss.__mro__[1]
"""The common base class of torch's losses, whose name is private."""
SHOWN = "loss=lambda model, batch: {name}(model(batch[0]), batch[1])"
SAME_SHAPES = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.KLDivLoss,
    nn.PoissonNLLLoss,
    nn.SoftMarginLoss,
)
"""Losses for which torch would broadcast output and target to a common shape, and compute something else."""
FUNCTIONS: dict[Any, Callable[[], nn.Module]] = {
    functional.mse_loss: nn.MSELoss,
    functional.l1_loss: nn.L1Loss,
    functional.smooth_l1_loss: nn.SmoothL1Loss,
    functional.huber_loss: nn.HuberLoss,
    functional.binary_cross_entropy: nn.BCELoss,
    functional.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    functional.cross_entropy: nn.CrossEntropyLoss,
    functional.nll_loss: nn.NLLLoss,
}


def as_loss_function(loss: Any) -> Any:
    """`loss` unchanged, unless it is one of torch's."""
    made = FUNCTIONS[loss]() if inspect.isfunction(loss) and loss in FUNCTIONS else loss
    if not isinstance(made, TORCH_LOSS):
        return loss
    name = type(made).__name__
    inputs = list(inspect.signature(made.forward).parameters)
    if inputs != ["input", "target"]:
        raise SpecError(
            f"{name} takes ({', '.join(inputs)}), which are not the outputs and targets of one batch.",
            where="loss",
            fix=[f"loss=lambda model, batch: nn.{name}()(...), with the tensors of the batch"],
        )
    if made.reduction not in ("mean", "batchmean"):
        raise SpecError(
            f"{name}(reduction={made.reduction!r}) is not a mean over the batch.",
            where="loss",
            fix=[f"nn.{name}()", f"loss=lambda model, batch: (the sum, its weight), by {name}(reduction='sum')"],
        )
    return _LossFunction(made)


class _LossFunction:
    """A torch loss as a function of (model, batch)."""

    def __init__(self, loss: nn.Module) -> None:
        self._loss, self._name = loss, type(loss).__name__
        self._sum: nn.Module | None = None
        if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
            self._sum = copy.copy(loss)
            self._sum.reduction = "sum"

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            shape = f"{len(batch)} parts" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
            raise BadLoss(
                f"loss=nn.{self._name}() takes batches (inputs, targets); this one is {shape}.",
                fix=[SHOWN.format(name=f"nn.{self._name}()"), "data that gives such pairs, or collate="],
            )
        output, target = model(batch[0]), batch[1]
        if isinstance(self._loss, SAME_SHAPES):
            self._check_shapes(output, target)
        self._loss.to(output.device)
        if self._sum is None or target.is_floating_point():
            return self._loss(output, target)
        return self._sum.to(output.device)(output, target), self._weight(target)

    def _weight(self, target: Tensor) -> Tensor:
        """The number by which torch divides the sum."""
        counted = target[target != self._loss.ignore_index]
        weights = self._loss.weight
        return weights[counted].sum() if isinstance(weights, Tensor) else counted.new_tensor(counted.numel())

    def _check_shapes(self, output: Any, target: Tensor) -> None:
        if isinstance(output, Tensor) and output.shape != target.shape:
            raise BadLoss(
                f"The model returns {tuple(output.shape)} and the targets are {tuple(target.shape)}: "
                f"{self._name} would broadcast them, and compare every output with every target.",
                fix=["targets of the outputs' shape, such as y.unsqueeze(1) or y[:, None]", "model(x).squeeze(1)"],
            )
