"""What the user's loss and metric functions may return, and the errors for anything else."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from manyhands.errors import BadLoss, TrainingFailed

__all__ = ["as_loss", "first_non_finite", "is_per_example", "metric_sum", "refuse_metric"]


def as_loss(result: Any, rows: int) -> tuple[Tensor, float, float]:
    """What a loss function returned, how many times it counts in the sum over the examples, and that sum's weight."""
    if isinstance(result, Tensor) and result.numel() == 1:
        return result, float(rows), float(rows)
    if isinstance(result, tuple) and len(result) == 2:
        total, weight = result
        if isinstance(total, Tensor) and total.numel() == 1:
            return total, 1.0, float(weight)
    raise BadLoss(
        f"The loss function returned {_describe(result)}, not a scalar or a (sum, weight) pair.",
        fix=[
            "return the mean over the batch, such as cross_entropy(model(x), y)",
            "or a pair: (losses.sum(), len(losses))",
        ],
    )


def _describe(result: Any) -> str:
    if isinstance(result, Tensor):
        return f"a tensor of shape {tuple(result.shape)}"
    return f"a {type(result).__name__}"


def metric_sum(name: str, values: Any, rows: int) -> float:
    if not is_per_example(values, rows):
        refuse_metric(name, values, rows)
    return float(values.double().sum())


def is_per_example(values: Any, rows: int) -> bool:
    return isinstance(values, Tensor) and values.shape[:1] == (rows,) and values.numel() == rows


def refuse_metric(name: str, values: Any, rows: int) -> NoReturn:
    raise TrainingFailed(
        f"Metric {name!r} returned {_describe(values)} for {rows} examples; it must return one value per example.",
        fix=["(model(x).argmax(1) == y).float()", "reduction='none' in a loss function"],
    )


def first_non_finite(model: nn.Module) -> str | None:
    for kind in ("value", "gradient"):
        for name, param in model.named_parameters():
            tensor = param.detach() if kind == "value" else param.grad
            if tensor is not None and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                return f"the first parameter with a non-finite {kind} is {name}"
    return None
