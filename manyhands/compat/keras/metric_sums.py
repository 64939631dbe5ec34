"""Metrics over slices: what they add up, and the check that a batch's halves add up to the batch.

A Keras metric keeps sums in variables. Slices of a batch, on any worker, each add to them; if the parts of a batch add
what the whole batch adds, every worker may have the sum of all parts. That is checked once, on real outputs. Start
reading at `check_halves`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import torch
from torch import Tensor

from manyhands.errors import BadLoss, SpecError

__all__ = ["Batch", "add_up", "check_halves", "sums_of", "values_of", "variables_of"]

TOLERANCE = 1e-3
"""Relative. Sums in fp32 of a few rows agree far better, sums in half precision just so."""

Batch = tuple[Any, Any, Any, Any]
"""Inputs, targets, outputs, sample weights."""


def metrics_of(model: Any) -> list[Any]:
    """Every metric of the model, each once."""
    found: list[Any] = []
    for metric in model.metrics:
        found += metric.metrics if hasattr(metric, "metrics") else [metric]
    return list({id(metric): metric for metric in found}.values())


def variables_of(model: Any) -> list[Any]:
    found = [variable for metric in model.metrics for variable in metric.variables]
    return list({id(variable): variable for variable in found}.values())


def sums_of(model: Any) -> list[Tensor]:
    """The tensors that the model's metrics add to. They stay the same objects for as long as the metrics do."""
    return [variable.value for variable in variables_of(model)]


def values_of(tensors: list[Tensor]) -> Tensor:
    """All values in one fp64 vector, on the CPU."""
    parts = [one.detach().reshape(-1).double().cpu() for one in tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)


def add_up(tensors: list[Tensor], values: Tensor) -> None:
    """Write such a vector back."""
    start = 0
    with torch.no_grad():
        for one in tensors:
            one.copy_(values[start : start + one.numel()].view_as(one))
            start += one.numel()


def check_halves(model: Any, batch: Batch) -> bool:
    """`SpecError` or `BadLoss`, with its name, for what slices cannot compute. False: too few rows to check.

    Nothing is changed: metrics get their values back.
    """
    rows = _rows(batch)
    if rows < 2:
        return False
    for metric in metrics_of(model):
        if not metric.variables:
            raise _refused(metric, "keeps its values elsewhere than in its variables")
    tensors = sums_of(model)
    before = values_of(tensors)
    try:
        with torch.no_grad():
            _check_metrics(model, tensors, batch, rows)
            _check_loss(model, batch, rows)
    finally:
        add_up(tensors, before)
    return True


def _check_metrics(model: Any, tensors: list[Tensor], batch: Batch, rows: int) -> None:
    first, second = _cut(batch, 0, rows // 2), _cut(batch, rows // 2, rows)

    def added(*parts: Batch) -> Tensor:
        for metric in metrics_of(model):
            metric.reset_state()
        start = values_of(tensors)
        for x, y, outputs, weights in parts:
            model.compute_metrics(x, y, outputs, sample_weight=weights)
        return values_of(tensors) - start

    whole, in_turn, apart = added(batch), added(first, second), added(first) + added(second)
    for found in (in_turn, apart):
        wrong = ~torch.isclose(found, whole, rtol=TOLERANCE, atol=TOLERANCE * 1e-2)
        if wrong.any():
            metric = _owner(model, int(wrong.nonzero()[0]))
            raise _refused(metric, "adds something else for a batch than for its two halves")


def _check_loss(model: Any, batch: Batch, rows: int) -> None:
    half = rows // 2

    def sum_over(low: int, high: int) -> float:
        x, y, outputs, weights = _cut(batch, low, high)
        mode = {"training": False} if model._compute_loss_has_training_arg else {}
        loss = model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weights, **mode)
        return float(loss) * (high - low)

    whole, halves = sum_over(0, rows), sum_over(0, half) + sum_over(half, rows)
    if abs(whole - halves) > TOLERANCE * max(abs(whole), abs(halves), 1e-6):
        raise BadLoss(
            f"The loss of {rows} rows is {whole / rows:.6g}, but the mean over its two halves is {halves / rows:.6g}: "
            "it is not a mean over examples, so slices of a batch cannot be averaged.",
            fix=[
                'reduction="sum_over_batch_size" of a keras loss, which is the default',
                "for a sum: that, and the learning rate multiplied by the rows of a batch",
                "slices=1 and one worker, for a loss that compares the examples of a batch",
            ],
        )


def _refused(metric: Any, why: str) -> SpecError:
    return SpecError(
        f"The metric {metric.name!r} ({type(metric).__name__}) {why}, so the results of slices cannot be merged.",
        where="compile(metrics=...)",
        fix=[
            "a function that returns one value per example, not their mean",
            "a keras.metrics.Metric whose update_state adds to variables made with add_weight or add_variable",
            "without it in compile, and from model.predict(...) afterwards",
        ],
    )


def _owner(model: Any, index: int) -> Any:
    """The metric that has the value with this index."""
    owner = {id(variable): metric for metric in metrics_of(model) for variable in metric.variables}
    for variable in variables_of(model):
        index -= variable.value.numel()
        if index < 0:
            return owner[id(variable)]
    raise AssertionError("the index is of one of the variables")


def _rows(batch: Batch) -> int:
    return int(next(one.shape[0] for one in keras.tree.flatten(batch) if one is not None))


def _cut(batch: Batch, low: int, high: int) -> Batch:
    cut: Callable[[Any], Any] = lambda one: one if one is None else one[low:high]  # noqa: E731
    x, y, outputs, weights = (keras.tree.map_structure(cut, part) for part in batch)
    return x, y, outputs, weights
