"""When `fit` validates and adds a row to its history: at the end of epochs, or by number of steps and time.

Pure functions of values that all workers have, so all decide the same. Time is measured by the chief, which requests a
validation in the exchange of a step. Start reading at `Validations.is_due`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from manyhands.errors import SpecError

__all__ = ["Moment", "Validations", "check_train_metrics", "check_validations", "last_row_of", "only_at_the_end"]


class Moment(NamedTuple):
    """The progress of a call of `fit` after a committed step."""

    step: int
    began_at: int
    """The step at which the call began."""
    last_row: int
    """The step of the newest row of the call's history; `began_at` if it has no row."""
    ends_epoch: bool = False
    ends_fit: bool = False
    requested: bool = False
    """The chief has requested a validation because of the time, and all workers have received the request."""


class Validations(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `fit` about validation."""

    every_steps: int | None = None
    every_s: float | None = None
    by_steps: bool = False
    """The length of the call was given in steps, so it may end inside an epoch."""

    @property
    def at_epochs(self) -> bool:
        return self.every_steps is None and self.every_s is None

    def is_due(self, at: Moment) -> bool:
        """Whether a row is added after this step. Never two for one step, and none before the call's first step."""
        if at.step <= at.last_row:
            return False
        if self.at_epochs:
            return at.ends_epoch or (at.ends_fit and self.by_steps)
        return at.ends_fit or at.requested or self._has_passed(at)

    def _has_passed(self, at: Moment) -> bool:
        """Whether a multiple of `every_steps` was passed since the last row; a late row does not delay the next."""
        every = self.every_steps
        return every is not None and (at.step - at.began_at) // every > (at.last_row - at.began_at) // every

    def next_step(self, step: int, began_at: int) -> int | None:
        """The first step after `step` at which a validation is due by the number of steps."""
        every = self.every_steps
        return None if every is None else step + every - (step - began_at) % every


def check_validations(asked: Mapping[str, Any], *, validates: bool) -> None:
    """`SpecError` if `validate_every` or `validate_every_s` of `fit` is wrong. `validates`: there is data for it."""
    for name, value in asked.items():
        if value is None:
            continue
        _check_number(name, value)
        if not validates:
            raise SpecError(
                f"{name}={value} was given, but there is nothing to validate on.",
                where="fit",
                fix=["validation=(x, y), data that is not trained on", "validation_split=0.1", f"no {name}="],
            )


def _check_number(name: str, value: Any) -> None:
    if name.endswith("_s"):
        fits = isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 < float(value) < math.inf
        wanted, usual = "a number of seconds above 0", "60.0"
    else:
        fits = isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1
        wanted, usual = "a whole number of steps from 1 on", "100"
    if not fits:
        raise SpecError(f"{name} is {value!r}, but must be {wanted}.", where="fit", fix=[f"{name}={usual}"])


def check_train_metrics(rows: Any, metrics: Mapping[str, Any]) -> None:
    if rows is None:
        return
    if not isinstance(rows, numbers.Integral) or isinstance(rows, bool) or rows < 1:
        raise SpecError(
            f"train_metrics is {rows!r}, but must be a number of rows of the training data, from 1 on.",
            where="fit",
            fix=["train_metrics=1000"],
        )
    if not metrics:
        raise SpecError(
            f"train_metrics={rows} was given, but the trainer has no metrics.",
            where="fit",
            fix=[
                'mh.Trainer(metrics={"accuracy": ...})',
                "no train_metrics=: the history has the training loss anyway",
            ],
        )


def only_at_the_end(validations: Validations, num_steps: int | None) -> str:
    """A warning if `validate_every` is above `num_steps`, the steps of the call; otherwise empty."""
    every = validations.every_steps
    if every is None or num_steps is None or validations.every_s is not None or not 0 < num_steps < every:
        return ""
    return f"validate_every={every} is above the {num_steps} steps of this fit: it validates once, at its end."


def last_row_of(history: Sequence[Mapping[str, float]], began_at: int) -> int:
    return int(history[-1]["step"]) if history else began_at
