"""One call of `fit`: the training loop, told from top to bottom in `Fit._loop`.

The loop knows a strategy's verbs, steps from `data`, hooks and events. What a step does is the strategy's business,
what a checkpoint holds is `training`'s, when it is taken is `checkpointing`'s.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from manyhands.data.batches import Step
from manyhands.errors import MemoryChanged, PeerLost, Preempted
from manyhands.events import EpochDone, Validated
from manyhands.parallel.replicas.divergence import CopiesDiffer, WrongGradient
from manyhands.strategies.base import StepStats
from manyhands.training.elastic.regroup import Regrouping
from manyhands.training.loop.step_lifecycle import Steps
from manyhands.training.state.training_state import Training
from manyhands.training.step.hooks import EarlyStop
from manyhands.training.step.step_requests import END_FIT, LEAVE, REGROUP, TELL, saves, validates
from manyhands.training.step.validation_schedule import Moment, Validations, last_row_of

__all__ = ["TRAINED", "Fit", "FitSettings"]

TRAINED = "train:"
"""Names of metrics on training data begin with it, among the results of a validation."""


class FitSettings(msgspec.Struct, kw_only=True):
    scheduler_every: str
    early_stop: EarlyStop | None
    validate: Callable[[], dict[str, float]] | None
    goes_on: bool
    """The run was resumed inside this call, so its first checkpoint is there."""
    validations: Validations | None = None
    """None: there is no history."""
    epochs: int | None = None


class Fit:
    """Runs the loop from wherever `training` stands. `trainer` is what hooks are handed."""

    def __init__(
        self, trainer: Any, training: Training, steps: Steps, regrouping: Regrouping, settings: FitSettings
    ) -> None:
        self._trainer, self._training, self._steps = trainer, training, steps
        self._regrouping, self._settings = regrouping, settings
        self._worker, self._hooks = training.worker, training.hooks
        self._announced = self._told = 0
        self._checkpoints_told: set[int] = set()
        self._last_row_s = time.monotonic()
        self.stop_asked = False

    def run(self) -> list[dict[str, float]]:
        steps = self._steps
        error: BaseException | None = None
        steps.after_save = self._tell_checkpoints
        try:
            self._hooks.call("begin", self._trainer)
            self._training.restore_hooks()
            if not self._settings.goes_on:
                steps.save("first checkpoint", required=True)
            self._loop()
            self._worker.report(self._training.progress.step, "ending")  # the resumed step, where none was left to do
            self._worker.end_trial()
            steps.checking.at_end()
            self._regrouping.agreed(self._training.tell_layout)
            steps.save("end of fit", required=True)
        except BaseException as raised:
            error = raised
            if isinstance(raised, MemoryChanged):
                steps.checking.distrust_last()
            self._tell_failure(raised)
            raise
        finally:
            steps.end()
            self._hooks.call("end", self._trainer, error)
            steps.close()
        return self._training.progress.history

    def _loop(self) -> None:
        self._steps.begin()
        if self._training.progress.ended:
            return
        if self._is_open:
            assert self._training.last_stats is not None
            if self._after(self._training.last_stats, last_of_epoch=self._is_epoch_open):
                return
        while (step := self._steps.next()) is not None:
            if step.number > self._announced:
                self._announced = step.number
                self._hooks.call("before_step", self._trainer, step.number)
            self._worker.report(step.number, "training")
            group = self._worker.group.generation
            stats = self._train(step)
            if stats is None:
                continue  # its slices are divided anew
            if self._after(stats, last_of_epoch=step.last_of_epoch):
                return
            # If members went over meanwhile, there may be no newer group; if there is, the chief will say so again.
            if stats.stop == REGROUP and self._worker.group.generation == group:
                self._regrouping.change()

    @property
    def _is_open(self) -> bool:
        """Whether this worker was admitted while the others validated what their last step came to."""
        stats = self._training.last_stats
        return self._is_epoch_open or (stats is not None and self._is_row_due(stats.stop, ends_epoch=False))

    @property
    def _is_epoch_open(self) -> bool:
        progress = self._training.progress
        return progress.row == 0 and progress.epoch_rows > 0

    def _after(self, stats: StepStats, *, last_of_epoch: bool) -> bool:
        """What follows a step that is committed. True: none follows it."""
        self._end_interval(stats.stop, last_of_epoch=last_of_epoch)
        if stats.stop == LEAVE:
            self._steps.leave()
        self._steps.after_step(save=saves(stats.stop))
        if stats.stop == TELL:
            self._tell_checkpoints()
        return self._training.progress.ended

    def _end_interval(self, stop: int, *, last_of_epoch: bool) -> None:
        """Add a row to the history and end the epoch, as far as that is due; `progress` knows then whether to end."""
        due = self._is_row_due(stop, ends_epoch=last_of_epoch)
        if due:
            self._add_row(ends_epoch=last_of_epoch)
        if last_of_epoch:
            self._end_epoch()
        progress = self._training.progress
        has_row = bool(progress.history) and last_row_of(progress.history, 0) == progress.step
        progress.ended = self._ends_fit(stop) or (has_row and self._stopped_early())
        if due and self._is_new_best() and not progress.ended and not self._is_last_step(last_of_epoch):
            self._steps.save("best checkpoint")
        if due or last_of_epoch:
            self._training.keep()

    def _is_row_due(self, stop: int, *, ends_epoch: bool) -> bool:
        validations, progress = self._settings.validations, self._training.progress
        if validations is None:
            return False
        ends_fit = self._ends_fit(stop) or self._is_last_step(ends_epoch)
        moment = Moment(
            progress.step,
            progress.call_step,
            last_row_of(progress.history, progress.call_step),
            ends_epoch=ends_epoch,
            ends_fit=ends_fit,
            requested=self._requests_row(stop),
        )
        # Inside a round of averaging, losing a worker would take the others back to before what they validate.
        closed = self._training.engine.round_closed or not self._worker.is_elastic
        return (closed or ends_epoch or ends_fit) and validations.is_due(moment)

    def _ends_fit(self, stop: int) -> bool:
        return stop == END_FIT

    def _requests_row(self, stop: int) -> bool:
        return validates(stop)

    def _is_last_step(self, ends_epoch: bool) -> bool:
        progress, epochs = self._training.progress, self._settings.epochs
        last_epoch = ends_epoch and epochs is not None and progress.epoch - progress.call_epoch >= epochs
        return progress.step == self._steps.total_steps or last_epoch

    @property
    def _is_time_for_row(self) -> bool:
        """By the chief's clock: the other workers receive its request with the step."""
        validations = self._settings.validations
        if validations is None or validations.every_s is None or not self._worker.is_chief:
            return False
        return time.monotonic() - self._last_row_s >= validations.every_s

    def _train(self, step: Step) -> StepStats | None:
        """One step, committed; None if it has to begin anew, because members were lost and not all had begun it."""
        engine, regrouping = self._training.in_step, self._regrouping
        regrouping.division = self._worker.group.generation
        going_on = False
        while True:
            try:
                stats = self._compute(step, going_on)
            except CopiesDiffer as differ:
                self._steps.settle(differ)
                return None
            except PeerLost as lost:
                arrival = self._steps.recover(lost)
                if arrival.received:  # others have committed it
                    assert self._training.last_stats is not None
                    self._steps.settle_rows()
                    self._tell_hooks(step, self._training.last_stats)
                    return self._training.last_stats
                going_on = arrival.same_step and engine.can_go_on
                if not going_on:
                    regrouping.division = ""
                    return None
            else:
                self._commit(step, stats)
                return stats

    def _compute(self, step: Step, going_on: bool) -> StepStats:
        engine = self._training.in_step
        try:
            if going_on:
                return engine.resume_step()
            stop = self._steps.wish(step.number, end=self.stop_asked, validate=self._is_time_for_row)
            return engine.train_step(step, stop=stop, collect=self._training.garbage.wanted)
        except WrongGradient as wrong:
            raise self._steps.checking.expose(wrong) from None

    def _commit(self, step: Step, stats: StepStats) -> None:
        progress = self._training.progress
        progress.epoch_loss += stats.loss * stats.rows
        progress.epoch_rows += stats.rows
        progress.row_loss += stats.loss * stats.rows
        progress.row_rows += stats.rows
        progress.results = {}
        if self._settings.scheduler_every == "step" and not stats.skipped:
            self._advance_schedule({})
        self._steps.done(step, stats)
        self._steps.settle_rows()
        self._tell_hooks(step, stats)

    def _tell_hooks(self, step: Step, stats: StepStats) -> None:
        """Once: a step that was taken back, and is taken again, is nothing new to them."""
        if step.number > self._told:
            self._told = step.number
            self._hooks.call("after_step", self._trainer, step.number, stats)

    def _add_row(self, *, ends_epoch: bool) -> None:
        """The training since the last row, and what validation finds now."""
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
        progress = self._training.progress  # another one, if a worker was lost in it
        validated = {name: value for name, value in found.items() if not name.startswith(TRAINED)}
        on_trained = {name.removeprefix(TRAINED): found[name] for name in found if name.startswith(TRAINED)}
        on_trained.pop("loss", None)  # a row's loss is that of the training itself
        row |= on_trained | {f"val_{name}": value for name, value in validated.items()}
        seen = {"loss": trained, **on_trained}
        progress.results = {**validated, **{f"train_{n}": v for n, v in seen.items()}} if validated else seen
        progress.row_loss, progress.row_rows = 0.0, 0
        progress.history.append(row)
        if not ends_epoch:
            self._worker.emit(Validated(time_s=time.time(), epoch=int(row["epoch"]), step=progress.step, results=row))
        self._training.start_clock()
        self._last_row_s = time.monotonic()

    def _validate(self) -> dict[str, float]:
        """With its hooks around it. They are not called again if a worker is lost in it and the others repeat it."""
        if self._settings.validate is None:
            return {}
        self._worker.report(self._training.progress.step, "validating")
        self._hooks.call("before_validation", self._trainer)
        found = self._settings.validate()
        of_validation = {name: value for name, value in found.items() if not name.startswith(TRAINED)}
        self._hooks.call("after_validation", self._trainer, of_validation)
        return found

    def _end_epoch(self) -> None:
        progress = self._training.progress
        is_new = progress.epoch_rows > 0  # else it came with the state of a worker that has been here
        if is_new:
            progress.epoch_mean = progress.epoch_loss / progress.epoch_rows
            progress.epoch_loss, progress.epoch_rows = 0.0, 0
        results = self._results_of_epoch()
        epoch = int(results["epoch"])
        if is_new and self._settings.scheduler_every == "epoch":
            self._advance_schedule({"loss": self._newest_loss()})
        if is_new:
            self._worker.emit(EpochDone(time_s=time.time(), epoch=epoch, step=progress.step, results=results))
        self._hooks.call("after_epoch", self._trainer, epoch, results)
        self._training.start_clock()

    def _results_of_epoch(self) -> dict[str, float]:
        """Its row; where validation goes by steps, the mean loss of the whole epoch in place of that row's."""
        progress, validations = self._training.progress, self._settings.validations
        row = progress.history[-1] if progress.history and progress.history[-1]["step"] == progress.step else {}
        if validations is not None and validations.at_epochs and row:
            return row
        epoch = progress.epoch - 1 - progress.call_epoch
        return {**row, "epoch": epoch, "step": progress.step, "loss": progress.epoch_mean}

    def _newest_loss(self) -> float:
        """Of the last validation; else of the epoch's training."""
        progress = self._training.progress
        validated = [row["val_loss"] for row in progress.history if "val_loss" in row]
        return validated[-1] if validated else progress.epoch_mean

    def _tell_checkpoints(self) -> None:
        """Call hooks with what the chief has committed. For all workers alike."""
        self._call_with(self._steps.take_committed())

    def _call_with(self, checkpoints: Iterable[tuple[int, str]]) -> None:
        for step, path in checkpoints:
            if step not in self._checkpoints_told:
                self._checkpoints_told.add(step)
                self._hooks.call("on_checkpoint", self._trainer, step, path)

    def _tell_failure(self, error: BaseException) -> None:
        """A stop on request is no failure. What a hook raises here must not hide what it was called for."""
        if not isinstance(error, Exception) or isinstance(error, Preempted):
            return
        try:
            self._hooks.call("on_failure", self._trainer, error)
        except Exception as raised:
            error.add_note(f"A hook's on_failure raised {type(raised).__name__}: {raised}")

    def _advance_schedule(self, results: dict[str, float]) -> None:
        scheduler = self._training.scheduler
        if scheduler is None:
            return
        if hasattr(scheduler, "patience") and results:  # ReduceLROnPlateau looks at a result
            scheduler.step(results["loss"])
        else:
            scheduler.step()

    def _stopped_early(self) -> bool:
        early, history = self._settings.early_stop, self._training.progress.history
        if early is None or not history:
            return False
        name = f"val_{early.metric}" if f"val_{early.metric}" in history[-1] else early.metric
        rows = [row for row in history if name in row]
        if not early.verdict([row[name] for row in rows]):
            return False
        self._worker.warn(early.reason(name, rows))
        return True

    def _is_new_best(self) -> bool:
        """Whether the weights as they are now are the ones that the best checkpoint should have."""
        best, progress = self._steps.saver.best, self._training.progress
        value = progress.results.get(best.result, math.nan) if best is not None else math.nan
        if best is None or not math.isfinite(value) or not best.is_better(value, progress.best):
            return False
        progress.best = value
        return True
