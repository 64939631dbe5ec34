"""Metrics over slices: what they add up, and the check that a batch's halves add up to the batch.

A Keras metric keeps sums in variables. Slices of a batch, on any worker, each add to them; if the parts of a batch add
what the whole batch adds, every worker may have the sum of all parts. That is checked on real outputs. Start
reading at `HalvesCheck`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import torch
from torch import Tensor

from manyhands.errors import BadLoss, SpecError

__all__ = ["Batch", "HalvesCheck", "add_up", "sums_of", "values_of", "variables_of"]

TOLERANCE = 1e-3
"""Relative. Sums in fp32 of a few rows agree far better, sums in half precision just so."""

ROUNDING = 1e-6
"""What is lost of a row's loss, or of a metric's term of size 1, at most."""

FIRST = 16
"""Slices that are all checked: a mean over some of the rows, such as those with a label, may agree in one of them."""

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


class HalvesCheck:
    """Checks the first slices, and then one every time that twice as many were seen.

    A slice of one row has no halves. It is checked beside a copy of itself, and beside the row before it; what is to be
    found out is how losses and metrics add up rows, and for that rows may come from different steps.
    """

    def __init__(self) -> None:
        self._num_seen, self._next = 0, 1
        self._row_before: Batch | None = None

    def _is_due(self) -> bool:
        self._num_seen += 1
        return self._num_seen >= self._next

    def _after(self) -> int:
        return self._num_seen + 1 if self._num_seen < FIRST else 2 * self._num_seen

    def see_test(self, model: Any, step: Callable[[int, int], None], rows: int) -> None:
        """The same for an evaluation: `step(low, high)` adds some rows of a batch to the metrics."""
        if rows > 1 and self._is_due():
            self._next = self._after()
            check_test_halves(model, step, rows)

    def see(self, model: Any, batch: Batch) -> None:
        """`SpecError` or `BadLoss`, with its name, for what slices cannot compute. Nothing is changed."""
        if not self._is_due():
            return
        batch = keras.tree.map_structure(lambda one: None if one is None else one.detach(), batch)
        if _rows(batch) > 1:
            self._next, self._row_before = self._after(), None
            check_halves(model, batch)
            return
        if self._row_before is None:
            check_halves(model, _beside(batch, batch))
        elif _shapes(batch) == _shapes(self._row_before):
            self._next = self._after()
            check_halves(model, _beside(self._row_before, batch))
        self._row_before = batch


def _beside(first: Batch, second: Batch) -> Batch:
    joined: Batch = keras.tree.map_structure(lambda a, b: None if a is None else torch.cat([a, b]), first, second)
    return joined


def _shapes(batch: Batch) -> list[Any]:
    return [one.shape for one in keras.tree.flatten(batch) if one is not None]


def check_halves(model: Any, batch: Batch) -> None:
    """Of two rows or more: what the parts add must be what the whole adds, also where rows have different weights."""
    rows = _rows(batch)
    for metric in metrics_of(model):
        if not metric.variables:
            raise _refused(metric, "keeps its values elsewhere than in its variables")
    tensors = sums_of(model)
    before = values_of(tensors)
    x, y, outputs, weights = batch
    outputs = keras.tree.map_structure(_in_full, outputs)
    varied = keras.tree.map_structure(lambda one: None if one is None else one * _different(one), weights)
    try:
        with torch.no_grad():
            for given in [weights] if weights is None else [weights, varied]:
                _check_metrics(model, tensors, (x, y, outputs, given), rows)
                _check_loss(model, (x, y, outputs, given), rows)
    finally:
        add_up(tensors, before)


def _in_full(one: Tensor) -> Tensor:
    """Rounding in half precision would be as large as what is looked for."""
    return one.float() if one.dtype in (torch.float16, torch.bfloat16) else one


def _different(weights: Tensor) -> Tensor:
    """A factor for each row. The user's weights may be equal in one slice, and not in the next."""
    factors = torch.linspace(0.5, 1.5, len(weights), dtype=weights.dtype, device=weights.device)
    return factors.view(-1, *[1] * (weights.ndim - 1))


def _check_metrics(model: Any, tensors: list[Tensor], batch: Batch, rows: int) -> None:
    first, second = _cut(batch, 0, rows // 2), _cut(batch, rows // 2, rows)

    def added(*parts: Batch) -> Tensor:
        for metric in metrics_of(model):
            metric.reset_state()
        start = values_of(tensors)
        for x, y, outputs, weights in parts:
            model.compute_metrics(x, y, outputs, sample_weight=weights)
        return values_of(tensors) - start

    # A sum of positive and negative values may be near 0, where the rounding of its terms is not.
    smallest = max(TOLERANCE * 1e-2, ROUNDING * rows * _largest(batch) ** 2)
    whole, in_turn, apart = added(batch), added(first, second), added(first) + added(second)
    for found in (in_turn, apart):
        wrong = ~torch.isclose(found, whole, rtol=TOLERANCE, atol=smallest, equal_nan=True)
        if wrong.any():
            metric = _owner(model, int(wrong.nonzero()[0]))
            raise _refused(metric, "adds something else for a batch than for its two halves")


def check_test_halves(model: Any, step: Callable[[int, int], None], rows: int) -> None:
    """What `step` adds for the rows must be what it adds for their two halves."""
    tensors = sums_of(model)
    before = values_of(tensors)

    def added(low: int, high: int) -> Tensor:
        for metric in metrics_of(model):
            metric.reset_state()
        start = values_of(tensors)
        step(low, high)
        return values_of(tensors) - start

    try:
        whole, halves = added(0, rows), added(0, rows // 2) + added(rows // 2, rows)
    finally:
        add_up(tensors, before)
    wrong = ~torch.isclose(halves, whole, rtol=TOLERANCE, atol=ROUNDING * rows, equal_nan=True)
    if wrong.any():
        raise _refused(
            _owner(model, int(wrong.nonzero()[0])), "adds something else for a batch than for its two halves"
        )


def _check_loss(model: Any, batch: Batch, rows: int) -> None:
    half = rows // 2

    def sum_over(low: int, high: int) -> float:
        x, y, outputs, weights = _cut(batch, low, high)
        mode = {"training": False} if model._compute_loss_has_training_arg else {}
        loss = model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weights, **mode)
        return float(loss) * (high - low)

    whole, halves = sum_over(0, rows), sum_over(0, half) + sum_over(half, rows)
    if abs(whole - halves) > max(TOLERANCE * max(abs(whole), abs(halves)), ROUNDING * rows):
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


def _largest(batch: Batch) -> float:
    """The size of the largest target or output, at least 1."""
    _, y, outputs, _ = batch
    found = [float(one.abs().max()) for one in keras.tree.flatten((y, outputs)) if one is not None and one.numel()]
    return max([1.0, *(one for one in found if math.isfinite(one))])


def _cut(batch: Batch, low: int, high: int) -> Batch:
    cut: Callable[[Any], Any] = lambda one: one if one is None else one[low:high]  # noqa: E731
    x, y, outputs, weights = (keras.tree.map_structure(cut, part) for part in batch)
    return x, y, outputs, weights
