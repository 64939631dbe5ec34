"""Hooks: any objects with any of the methods in `MOMENTS`, and `state` and `restore`.

They are called on every worker, in the order given, once per committed step, validation or checkpoint; only on the
chief if `chief_only` is true. When each is called is decided by `training/loop`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from manyhands.errors import SpecError
from manyhands.strategies.settings import at_least, one_of

__all__ = ["EarlyStop", "Hooks"]

MOMENTS = (
    "begin",
    "before_step",
    "after_step",
    "before_validation",
    "after_validation",
    "after_epoch",
    "on_checkpoint",
    "on_failure",
    "end",
)


class Hooks:
    def __init__(self, hooks: Sequence[Any], trainer: Any, *, is_chief: Callable[[], bool]) -> None:
        """`trainer` is every method's first argument. `is_chief` is called each time: the chief may have changed."""
        for hook in hooks:
            _check(hook)
        self._all, self._trainer, self._is_chief = list(hooks), trainer, is_chief
        self._methods: dict[str, list[tuple[bool, Any]]] = {}

    def call(self, moment: str, *arguments: Any) -> None:
        for chief_only, method in self._find(moment):
            if not chief_only or self._is_chief():
                method(self._trainer, *arguments)

    def listen_to(self, moment: str) -> bool:
        return bool(self._find(moment))

    def _find(self, moment: str) -> list[tuple[bool, Any]]:
        if moment not in self._methods:
            found = ((bool(getattr(hook, "chief_only", False)), getattr(hook, moment, None)) for hook in self._all)
            self._methods[moment] = [(chief_only, method) for chief_only, method in found if method is not None]
        return self._methods[moment]

    def state(self) -> list[Any]:
        return [hook.state() if hasattr(hook, "state") else None for hook in self._all]

    def restore(self, states: Sequence[Any]) -> None:
        for hook, state in zip(self._all, states, strict=False):
            if state is not None and hasattr(hook, "restore"):
                hook.restore(state)


def _check(hook: Any) -> None:
    """`SpecError` for a hook that would never be called: a class, or an object with another library's method names."""
    name = hook.__name__ if isinstance(hook, type) else type(hook).__name__
    if isinstance(hook, type):
        raise SpecError(f"The hook {name} is a class.", where="hooks", fix=[f"hooks=[{name}()]"])
    if not any(hasattr(hook, moment) for moment in (*MOMENTS, "state", "restore")):
        raise SpecError(
            f"The hook {name} has none of the methods that are called: {', '.join(MOMENTS)}.",
            where="hooks",
            fix=["def after_step(self, trainer, step, stats): ..."],
        )


class EarlyStop(msgspec.Struct, kw_only=True):
    """Stop `fit` when a result has not improved for `patience` rows of its history: epochs, or with `validate_every`
    validations. NaN is no improvement, so a training that has diverged is stopped as well.

    Args:
        metric: A name in the history's rows: "loss", or one of the trainer's `metrics`. With validation data it is the
            validation's value.
        patience: `fit` ends after this many rows in succession without an improvement.
        min_delta: A change by less than this is no improvement. In the unit of the metric; default: 0.
        mode: Whether "min" or "max" is better; "auto" takes small for losses and errors, large for the rest.
    """

    metric: str = "loss"
    patience: int = 3
    min_delta: float = 0.0
    mode: str = "auto"

    def __post_init__(self) -> None:
        one_of("mode", self.mode, ("auto", "min", "max"), "mh.EarlyStop")
        at_least("patience", self.patience, 1, "mh.EarlyStop")

    def verdict(self, values: Sequence[float]) -> bool:
        """Whether to stop after these values, one per row: a pure function, so that all workers decide the same."""
        down = self.mode == "min" or (self.mode == "auto" and smaller_is_better(self.metric))
        best, since = float("inf"), 0
        for value in (v if down else -v for v in values):
            best, since = (value, 0) if value < best - self.min_delta else (best, since + 1)
        return since >= self.patience

    def reason(self, name: str, rows: Sequence[Mapping[str, float]]) -> str:
        """Why `fit` stops, as a sentence for the user; `rows` have the result that decided under `name`."""
        step, numbers = int(rows[-1]["step"]), [row for row in rows if not math.isnan(row[name])]
        if any(math.isnan(row[name]) for row in rows[-self.patience :]):
            ever = f"since step {int(numbers[-1]['step'])}" if numbers else "from the start"
            return f"Stopped early at step {step}: {name} has not been a number {ever}, so the training has diverged."
        down = self.mode == "min" or (self.mode == "auto" and smaller_is_better(self.metric))
        best = (min if down else max)(numbers, key=lambda row: row[name])
        since = f"since step {int(best['step'])} ({best[name]:.4g})"
        return (
            f"Stopped early at step {step}: {name} has not improved {since}, for {self.patience} rows of the history."
        )


def smaller_is_better(metric: str) -> bool:
    return any(word in metric.lower() for word in ("loss", "error", "mse", "mae", "perplexity"))
