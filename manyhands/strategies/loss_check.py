"""Check, before the first slice is trained, that the user's loss and metrics work on a batch that is cut into slices.

The worker that computes one slice of the run's first step evaluates a few of its rows, in evaluation mode and without
gradient. Modes, buffers and random generators are restored, so training continues as if nothing had been computed.
`loss_kinds` draws the conclusion from the numbers. Start reading at `LossCheck.at`.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manyhands.data.randomness import randomness
from manyhands.parallel.model.step_buffers import ForeignState, changing_state
from manyhands.strategies.base import LossFn, MetricFn, SliceLike, StepLike
from manyhands.strategies.loss_kinds import LEAST_ROWS, Kind, LossAtCuts, LossValue, agrees, cuts, verdict, words
from manyhands.strategies.losses import as_loss, is_per_example, refuse_metric

__all__ = ["LossCheck", "measure", "rows_between", "undisturbed"]

MOST_ROWS = 16
"""Enough rows to see what kind of loss it is."""
TOLERANCE, COARSE_TOLERANCE = 1e-4, 2e-2
"""Between a loss and its parts. Kernels round differently for other numbers of rows, by 1e-6 in fp32; accelerators may
multiply in fewer bits, as autocast does. A sum is off by a factor of two, a mean over tokens by some percent."""


class LossCheck:
    """Checks the loss of one slice, and what metrics return for it. Calls `say` with a text for the user, once."""

    def __init__(
        self, step: int, metrics: Mapping[str, MetricFn], say: Callable[[str], None], *, may_couple: bool
    ) -> None:
        """`step` is the number of the first step. With `may_couple`, the user has fixed the number of slices."""
        self._step, self._metrics, self._say, self._may_couple = step, metrics, say, may_couple

    def is_at(self, step: StepLike, piece: SliceLike) -> bool:
        """Whether this is the slice to check: the first one with enough rows, so that exactly one worker checks it."""
        if step.number != self._step:
            return False
        enough = [v for v, (low, high) in enumerate(step.bounds) if high - low >= LEAST_ROWS]
        return bool(enough) and piece.index == enough[0]

    def at(self, model: nn.Module, loss: LossFn, piece: SliceLike, foreign: ForeignState) -> None:
        """Raises only for a metric that can never be right; an error of the user's code is raised in training again."""
        self._step = -1
        rows = min(piece.rows, MOST_ROWS)
        try:
            few = rows_between(piece.batch, piece.rows, 0, rows)
        except _Uncut:
            return
        with undisturbed(model, foreign):
            found = self._kind_of(model, loss, few, rows)
            returned = {name: self._returned(fn, model, few) for name, fn in self._metrics.items()}
        if found is not None and not (found[0] == "coupled" and self._may_couple):
            self._say(words(*found))
        for name, value in returned.items():
            self._judge_metric(name, value, rows)

    def _kind_of(self, model: nn.Module, loss: LossFn, batch: Any, rows: int) -> tuple[Kind, LossAtCuts] | None:
        tolerance = _tolerance(next((param.device.type for param in model.parameters()), "cpu"))
        try:
            measured = measure(lambda part: loss(model, part), batch, rows, tolerance)
        except Exception:  # a loss may work in training mode only, or on whole slices only
            return None
        kind = verdict(measured, tolerance)
        return (kind, measured) if kind is not None else None

    def _returned(self, metric: MetricFn, model: nn.Module, batch: Any) -> Any:
        try:
            return metric(model, batch)
        except Exception:  # training rows may lack what the metric needs
            return None

    def _judge_metric(self, name: str, value: Any, rows: int) -> None:
        if value is None or is_per_example(value, rows):
            return
        if not isinstance(value, Tensor) or value.numel() == 1:
            refuse_metric(name, value, rows)
        self._say(
            f"Metric {name!r} returned a tensor of shape {tuple(value.shape)} for {rows} rows of a batch to train on. "
            "In an evaluation it must return one value per example."
        )


def measure(loss: Callable[[Any], Any], batch: Any, rows: int, tolerance: float) -> LossAtCuts:
    """The loss of all rows and of their parts; where these disagree, also the values that show why."""
    low, high = cuts(rows)

    def of(start: int, stop: int) -> LossValue:
        value, times, weight = as_loss(loss(rows_between(batch, rows, start, stop)), stop - start)
        return LossValue(value.item() * times, weight)

    whole = loss(batch)
    value, times, weight = as_loss(whole, rows)
    measured = LossAtCuts(
        (low, high - low, rows - high),
        LossValue(value.item() * times, weight),
        of(0, low),
        of(low, rows),
        of(0, high),
        of(high, rows),
        isinstance(whole, tuple),
    )
    if agrees(measured, tolerance):
        return measured
    return dataclasses.replace(measured, b=of(low, high), again=of(0, rows))  # all rows again: is it deterministic?


@contextmanager
def undisturbed(model: nn.Module, foreign: ForeignState) -> Iterator[None]:
    """Evaluation mode without gradient, inside or outside of a slice; restores all state on exit."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(m, name, one) for m in model.modules() for name, one in m._buffers.items() if one is not None]
    trained = [param for param in model.parameters() if param.requires_grad]
    kept = [(one, one._version, one.detach().clone()) for one in changing_state(model, trained)]
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(randomness(0))
        stack.enter_context(foreign.out_of_slice())
        stack.enter_context(torch.no_grad())
        if "torch._dynamo" in sys.modules:  # else nothing is compiled; other numbers of rows would be compiled again
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            for module, _ in modes:  # one by one: in `model.eval` a model may do more than set its mode
                module.training = False
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for module, name, one in buffers:
                module._buffers[name] = one
            for one, version, value in kept:
                if one._version != version:
                    one.copy_(value)
            torch.clear_autocast_cache()  # it has weights that were converted without gradient


class _Uncut(Exception):
    """A batch of a type that we do not know how to cut into rows."""


def rows_between(batch: Any, rows: int, low: int, high: int) -> Any:
    """Rows `low` to `high` of a batch of `rows` rows; raises `_Uncut` where its rows cannot be recognised."""

    def cut(one: Any) -> Any:
        return rows_between(one, rows, low, high)

    if isinstance(batch, Tensor | np.ndarray):
        if batch.shape[:1] != (rows,):
            raise _Uncut
        return batch[low:high]
    if batch is None or isinstance(batch, str | bool):
        return batch
    if isinstance(batch, Mapping):
        return type(batch)({key: cut(value) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple | list):
        if len(batch) == rows and all(isinstance(one, str | bytes | int | float) for one in batch):
            return batch[low:high]
        parts = [cut(one) for one in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return dataclasses.replace(batch, **{f.name: cut(getattr(batch, f.name)) for f in dataclasses.fields(batch)})
    raise _Uncut


def _tolerance(device: str) -> float:
    return TOLERANCE if device == "cpu" and not torch.is_autocast_enabled(device) else COARSE_TOLERANCE
