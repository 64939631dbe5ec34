"""The history of one call of `fit`: when a row is added to it, what the row holds, and what is decided by it.

A row has the mean training loss since the row before, and the results of validation. Rows decide about early stopping,
the best checkpoint, and a learning rate that is scheduled by epochs. Start reading at `FitHistory.end_interval`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import msgspec

from manyhands.checkpoint.retention import Best
from manyhands.events import EpochDone, Validated
from manyhands.strategies.base import StepStats
from manyhands.training.state.training_state import TrainingState
from manyhands.training.step.hooks import EarlyStop
from manyhands.training.step.step_requests import END_FIT, validates
from manyhands.training.step.validation_schedule import Moment, Validations, last_row_of

__all__ = ["TRAINED", "FitHistory", "FitSettings"]

TRAINED = "train:"
"""Prefix of metrics on training data, among the results of a validation."""


class FitSettings(msgspec.Struct, kw_only=True):
    """The arguments of `fit` that concern rows and epochs."""

    scheduler_every: str
    early_stop: EarlyStop | None
    validate: Callable[[], dict[str, float]] | None
    """Collective. None: there is no data to validate on."""
    validations: Validations
    epochs: int | None


class FitHistory:
    """`total_steps` is the run's step number when the call ends; `best` says how the best checkpoint is chosen."""

    def __init__(
        self, training: TrainingState, settings: FitSettings, total_steps: int | None, best: Best | None
    ) -> None:
        self._training, self._settings, self._total_steps, self._best = training, settings, total_steps, best
        self._worker, self._hooks = training.worker, training.hooks
        self._last_row_s = time.monotonic()
        self.has_new_best = False
        """The current weights are to be saved as the best checkpoint."""
        self.at_epoch_end: Callable[[], None] = lambda: None
        """Called on every worker after the hooks of an epoch."""

    @property
    def scheduler_every(self) -> str:
        return self._settings.scheduler_every

    def count(self, stats: StepStats) -> None:
        """Add a step that is about to be committed."""
        progress = self._training.progress
        progress.epoch_loss += stats.loss * stats.rows
        progress.epoch_rows += stats.rows
        progress.row_loss += stats.loss * stats.rows
        progress.row_rows += stats.rows
        progress.results = {}

    @property
    def is_open(self) -> bool:
        """Whether this worker was admitted while the others validated the weights of their last step."""
        stats = self._training.last_stats
        return self.is_epoch_open or (stats is not None and self._is_row_due(stats.stop, ends_epoch=False))

    @property
    def is_epoch_open(self) -> bool:
        progress = self._training.progress
        return progress.row == 0 and progress.epoch_rows > 0

    @property
    def is_time_for_row(self) -> bool:
        """Whether `validate_every_s` has passed, by the chief's clock: other workers get its request with a step."""
        every_s = self._settings.validations.every_s
        if every_s is None or not self._worker.is_chief:
            return False
        return time.monotonic() - self._last_row_s >= every_s

    @property
    def last_row(self) -> int:
        """The step of the newest row; without any, the step at which the call began."""
        progress = self._training.progress
        return last_row_of(progress.history, progress.call_step)

    def next_due(self) -> int | None:
        """The next step after which a row is due by the number of steps."""
        progress = self._training.progress
        return self._settings.validations.next_step(progress.step, progress.call_step)

    def end_interval(self, stop: int, *, last_of_epoch: bool) -> bool:
        """After a committed step: add a row and end the epoch, if they are due. Collective.

        Returns whether either was due. Afterwards `progress.ended` is true if no step of the call follows.
        """
        due = self._is_row_due(stop, ends_epoch=last_of_epoch)
        if due:
            self._add_row(ends_epoch=last_of_epoch)
        if last_of_epoch:
            self._end_epoch()
        progress = self._training.progress
        has_row = bool(progress.history) and last_row_of(progress.history, 0) == progress.step
        progress.ended = stop == END_FIT or (has_row and self._stopped_early())
        is_better = due and self._is_better()
        self.has_new_best = is_better and not progress.ended and not self._is_last_step(last_of_epoch)
        return due or last_of_epoch

    def _is_row_due(self, stop: int, *, ends_epoch: bool) -> bool:
        progress = self._training.progress
        ends_fit = stop == END_FIT or self._is_last_step(ends_epoch)
        moment = Moment(
            progress.step,
            progress.call_step,
            self.last_row,
            ends_epoch=ends_epoch,
            ends_fit=ends_fit,
            requested=validates(stop),
        )
        # Inside an averaging round, a lost worker rolls the others back to a state before the one they validate.
        closed = self._training.engine.round_closed or not self._worker.is_elastic
        return (closed or ends_epoch or ends_fit) and self._settings.validations.is_due(moment)

    def _is_last_step(self, ends_epoch: bool) -> bool:
        progress, epochs = self._training.progress, self._settings.epochs
        last_epoch = ends_epoch and epochs is not None and progress.epoch - progress.call_epoch >= epochs
        return progress.step == self._total_steps or last_epoch

    def _add_row(self, *, ends_epoch: bool) -> None:
        """With the mean training loss since the last row, and the results of a validation."""
        progress, stats = self._training.progress, self._training.last_stats
        trained = progress.row_loss / max(progress.row_rows, 1)
        row: dict[str, float] = {
            "epoch": progress.epoch - progress.call_epoch - ends_epoch,
            "step": progress.step,
            "loss": trained,
        }
        if stats is not None and stats.lr is not None:
            row["lr"] = stats.lr
        found = self._validate()
        progress = self._training.progress  # another object, if a worker was lost in the validation
        validated = {name: value for name, value in found.items() if not name.startswith(TRAINED)}
        on_trained = {name.removeprefix(TRAINED): found[name] for name in found if name.startswith(TRAINED)}
        on_trained.pop("loss", None)  # a row's loss is the mean over training steps
        row |= on_trained | {f"val_{name}": value for name, value in validated.items()}
        seen = {"loss": trained, **on_trained}
        progress.results = {**validated, **{f"train_{n}": v for n, v in seen.items()}} if validated else seen
        progress.row_loss, progress.row_rows = 0.0, 0
        progress.history.append(row)
        if not ends_epoch:
            self._worker.events.emit(
                Validated(time_s=time.time(), epoch=int(row["epoch"]), step=progress.step, results=row)
            )
        self._last_row_s = time.monotonic()

    def _validate(self) -> dict[str, float]:
        """Validate and call the hooks; those are not called again if a worker is lost and the others repeat it."""
        if self._settings.validate is None:
            return {}
        self._worker.report(self._training.progress.step, "validating")
        self._hooks.call("before_validation")
        found = self._settings.validate()
        self._hooks.call("after_validation", {name: found[name] for name in found if not name.startswith(TRAINED)})
        return found

    def _end_epoch(self) -> None:
        progress = self._training.progress
        is_new = progress.epoch_rows > 0  # otherwise this worker received the state of one that has ended the epoch
        if is_new:
            progress.epoch_mean = progress.epoch_loss / progress.epoch_rows
            progress.epoch_loss, progress.epoch_rows = 0.0, 0
        results = self._results_of_epoch()
        epoch = int(results["epoch"])
        if is_new and self.scheduler_every == "epoch":
            self._training.advance_schedule(self._newest_loss())
        if is_new:
            self._worker.events.emit(EpochDone(time_s=time.time(), epoch=epoch, step=progress.step, results=results))
        self._hooks.call("after_epoch", epoch, results)
        self.at_epoch_end()

    def _results_of_epoch(self) -> dict[str, float]:
        """The epoch's row; with `validate_every`, the mean loss of the whole epoch in place of that row's."""
        progress = self._training.progress
        row = progress.history[-1] if progress.history and progress.history[-1]["step"] == progress.step else {}
        if self._settings.validations.at_epochs and row:
            return row
        epoch = progress.epoch - 1 - progress.call_epoch
        return {**row, "epoch": epoch, "step": progress.step, "loss": progress.epoch_mean}

    def _newest_loss(self) -> float:
        """The loss of the last validation; without any, the epoch's training loss."""
        progress = self._training.progress
        validated = [row["val_loss"] for row in progress.history if "val_loss" in row]
        return validated[-1] if validated else progress.epoch_mean

    def _stopped_early(self) -> bool:
        early, history = self._settings.early_stop, self._training.progress.history
        if early is None or not history:
            return False
        name = f"val_{early.metric}" if f"val_{early.metric}" in history[-1] else early.metric
        rows = [row for row in history if name in row]
        if not early.verdict([row[name] for row in rows]):
            return False
        self._worker.events.warn(early.reason(name, rows))
        return True

    def _is_better(self) -> bool:
        """Whether the newest row's result is the best of the call so far; if so, keep it as the best."""
        best, progress = self._best, self._training.progress
        value = progress.results.get(best.result, math.nan) if best is not None else math.nan
        if best is None or not math.isfinite(value) or not best.is_better(value, progress.best):
            return False
        progress.best = value
        return True
