"""One call of `fit`: the training loop, told from top to bottom in `Fit._loop`.

The loop knows a strategy's verbs, steps from `data`, hooks and events. What a step does is the strategy's business,
what a checkpoint holds is `training`'s, when it is taken is `saving`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from manyhands.data.batches import Step
from manyhands.errors import MemoryChanged, PeerLost
from manyhands.events import EpochDone
from manyhands.parallel.divergence import CopiesDiffer, WrongGradient
from manyhands.runtime.hooks import EarlyStop
from manyhands.runtime.regroup import Regrouping
from manyhands.runtime.steps import Steps
from manyhands.runtime.training import Training
from manyhands.runtime.wishes import END_FIT, LEAVE, REGROUP, SAVE
from manyhands.strategies.base import StepStats

__all__ = ["Fit", "FitSettings"]


class FitSettings(msgspec.Struct, kw_only=True):
    scheduler_every: str
    early_stop: EarlyStop | None
    validate: Callable[[], dict[str, float]] | None
    goes_on: bool
    """The run was resumed inside this call, so its first checkpoint is there."""


class Fit:
    """Runs the loop from wherever `training` stands. `trainer` is what hooks are handed."""

    def __init__(
        self, trainer: Any, training: Training, steps: Steps, regrouping: Regrouping, settings: FitSettings
    ) -> None:
        self._trainer, self._training, self._steps = trainer, training, steps
        self._regrouping, self._settings = regrouping, settings
        self._worker, self._hooks = training.worker, training.hooks
        self._announced = self._told = 0
        self.stop_asked = False

    def run(self) -> list[dict[str, float]]:
        steps = self._steps
        error: BaseException | None = None
        try:
            self._hooks.call("begin", self._trainer)
            self._training.restore_hooks()
            if not self._settings.goes_on:
                steps.save("first checkpoint", required=True)
            self._loop()
            self._worker.end_trial()
            steps.checking.at_end()
            self._regrouping.agreed(self._training.tell_layout)
            steps.save("end of fit", required=True)
        except BaseException as raised:
            error = raised
            if isinstance(raised, MemoryChanged):
                steps.checking.distrust_last()
            raise
        finally:
            steps.end()
            self._hooks.call("end", self._trainer, error)
            steps.close()
        return self._training.progress.history

    def _loop(self) -> None:
        self._steps.begin()
        if self._is_epoch_open:
            assert self._training.last_stats is not None
            if self._after(self._training.last_stats, last_of_epoch=True):
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
    def _is_epoch_open(self) -> bool:
        """Whether this worker was admitted while the others evaluated what an epoch came to."""
        progress = self._training.progress
        return progress.row == 0 and progress.epoch_rows > 0

    def _after(self, stats: StepStats, *, last_of_epoch: bool) -> bool:
        """What follows a step that is committed. True: none follows it."""
        if last_of_epoch:
            self._end_epoch()
            self._training.keep()
        if stats.stop == LEAVE:
            self._steps.leave()
        self._steps.after_step(save=stats.stop == SAVE)
        if stats.stop == END_FIT:
            return True
        if last_of_epoch and self._stopped_early():
            self._worker.warn("Stopped early: what early_stop watches has not improved for its patience.")
            return True
        return False

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
            stop = self._steps.wish(step.number, end=self.stop_asked)
            return engine.train_step(step, stop=stop, collect=self._training.garbage.wanted)
        except WrongGradient as wrong:
            raise self._steps.checking.expose(wrong) from None

    def _commit(self, step: Step, stats: StepStats) -> None:
        progress = self._training.progress
        progress.epoch_loss += stats.loss * stats.rows
        progress.epoch_rows += stats.rows
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

    def _end_epoch(self) -> None:
        progress, settings = self._training.progress, self._settings
        epoch = progress.epoch - 1 - progress.call_epoch
        known = [row for row in progress.history if row["epoch"] == epoch]
        if known:  # it came with the state of a worker that has been here
            self._hooks.call("after_epoch", self._trainer, epoch, known[0])
            return
        trained = progress.epoch_loss / max(progress.epoch_rows, 1)
        results: dict[str, float] = {"epoch": epoch, "step": progress.step, "loss": trained}
        if settings.validate is not None:
            self._worker.report(progress.step, "validating")
            validated = settings.validate()
            progress = self._training.progress  # another one, if a worker was lost in it
            results |= {f"val_{name}": value for name, value in validated.items()}
            progress.results = {**validated, "train_loss": trained}
        else:
            progress.results = {"loss": trained}
        progress.epoch_loss, progress.epoch_rows = 0.0, 0
        progress.history.append(results)
        if settings.scheduler_every == "epoch":
            self._advance_schedule(progress.results)
        self._worker.emit(EpochDone(time_s=time.time(), epoch=epoch, step=progress.step, results=results))
        self._hooks.call("after_epoch", self._trainer, epoch, results)
        self._training.start_clock()

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
        return early.verdict([row[name] for row in history if name in row])
