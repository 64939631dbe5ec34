"""One call of `fit`: the training loop, told from top to bottom in `Fit._loop`.

The loop knows a strategy's verbs, steps from `data`, hooks and events. What a step does is the strategy's business,
what a checkpoint holds is `training`'s, when it is taken is `saving`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from manyhands.data.batches import Batches, Step
from manyhands.errors import MemoryChanged, PeerLost, Preempted
from manyhands.events import EpochDone
from manyhands.parallel.divergence import CopiesDiffer, WrongGradient
from manyhands.runtime.checking import Checking
from manyhands.runtime.hooks import EarlyStop
from manyhands.runtime.regroup import Arrival, Regrouping
from manyhands.runtime.saving import Saver
from manyhands.runtime.training import Training
from manyhands.strategies.base import StepStats

__all__ = ["END_FIT", "LEAVE", "REGROUP", "SAVE", "Fit", "FitSettings"]

# What workers tell each other with every step; the largest wins. Each includes those before it, but for REGROUP, which
# is asked for again.
REGROUP, SAVE, END_FIT, LEAVE = 1, 2, 3, 4


class FitSettings(msgspec.Struct, kw_only=True):
    scheduler_every: str
    early_stop: EarlyStop | None
    validate: Callable[[], dict[str, float]] | None
    goes_on: bool
    """The run was resumed inside this call, so its first checkpoint is there."""


class Fit:
    """Runs the loop from wherever `training` stands. `trainer` is what hooks are handed.

    `make_batches` gives the steps from there on, for this worker's place in its group.
    """

    def __init__(
        self,
        trainer: Any,
        training: Training,
        make_batches: Callable[[], Batches],
        saver: Saver,
        regrouping: Regrouping,
        settings: FitSettings,
    ) -> None:
        self._trainer, self._training, self._make_batches = trainer, training, make_batches
        self._saver, self._regrouping, self._settings = saver, regrouping, settings
        self._worker, self._hooks, self._garbage = training.worker, training.hooks, training.garbage
        self._checking = Checking(training, saver, regrouping)
        self._batches: Batches | None = make_batches()
        self.total_steps = self._batches.total_steps
        self._announced = 0
        self.stop_asked = False

    def run(self) -> list[dict[str, float]]:
        error: BaseException | None = None
        try:
            self._hooks.call("begin", self._trainer)
            self._training.restore_hooks()
            if not self._settings.goes_on:
                self._save("first checkpoint", required=True)
            self._loop()
            self._worker.end_trial()
            self._checking.at_end()
            self._save("end of fit")
        except BaseException as raised:
            error = raised
            if isinstance(raised, MemoryChanged):
                self._checking.distrust_last()
            raise
        finally:
            self._garbage.end()
            self._training.tell_used(ended=True)
            self._hooks.call("end", self._trainer, error)
            self._close_batches()
            self._saver.close()
        return self._training.progress.history

    def _save(self, what: str, *, required: bool = False) -> None:
        """Save, and have everybody wait for it."""

        def work() -> None:
            self._saver.save_now(required=required)
            self._worker.wait_for_chief(what)

        self._regrouping.agreed(work)

    def _loop(self) -> None:
        self._training.start_clock()
        self._training.meter.start()
        self._garbage.begin()
        while (step := self._next_step()) is not None:
            if step.number > self._announced:
                self._announced = step.number
                self._hooks.call("before_step", self._trainer, step.number)
            self._worker.report(step.number, "training")
            stats = self._train(step)
            if stats is None:
                continue  # its slices are divided anew
            if step.last_of_epoch:
                self._end_epoch()
            if stats.stop == LEAVE:
                self._leave()
            self._saver.after_step(save=stats.stop == SAVE)
            if stats.stop == END_FIT:
                return
            if step.last_of_epoch and self._stopped_early():
                self._worker.warn("Stopped early: what early_stop watches has not improved for its patience.")
                return
            if stats.stop == REGROUP:
                self._regrouping.change()

    def _next_step(self) -> Step | None:
        while True:
            if self._batches is None:
                self._batches = self._make_batches()
                self.total_steps = self._batches.total_steps
            self._batches.divide(self._training.pacing.division)
            self._garbage.hold()
            try:
                return next(self._batches, None)
            except PeerLost as lost:  # rows that some workers lack are sent around here
                self._recover(lost)

    def _train(self, step: Step) -> StepStats | None:
        """One step, committed; None if it has to begin anew, because members were lost and not all had begun it."""
        engine, regrouping = self._training.engine, self._regrouping
        regrouping.division = self._worker.group.generation
        going_on = False
        while True:
            try:
                stats = self._compute(step, going_on)
            except CopiesDiffer as differ:
                self._settle(differ)
                return None
            except PeerLost as lost:
                arrival = self._recover(lost)
                if arrival.received:  # others have committed it
                    assert self._training.last_stats is not None
                    self._hooks.call("after_step", self._trainer, step.number, self._training.last_stats)
                    return self._training.last_stats
                going_on = arrival.same_step and engine.can_go_on
                if not going_on:
                    regrouping.division = ""
                    return None
            else:
                self._commit(step, stats)
                return stats

    def _compute(self, step: Step, going_on: bool) -> StepStats:
        engine = self._training.engine
        try:
            return engine.resume_step() if going_on else self._first_try(step)
        except WrongGradient as wrong:
            raise self._checking.expose(wrong) from None

    def _settle(self, differ: CopiesDiffer) -> None:
        """Whoever is lost meanwhile: copies are compared again when the step is done again."""
        self._regrouping.division = ""
        try:
            self._checking.settle(differ)
        except PeerLost as lost:
            self._recover(lost)
        self._close_batches()

    def _first_try(self, step: Step) -> StepStats:
        return self._training.engine.train_step(step, stop=self._wish(step.number), collect=self._garbage.wanted)

    def _recover(self, lost: PeerLost) -> Arrival:
        if not self._worker.is_elastic:
            raise lost
        self._garbage.release()
        return self._regrouping.go_over()

    def regrouped(self) -> None:
        """This worker has other slices from now on."""
        self._saver.take_office()
        self._close_batches()

    def _close_batches(self) -> None:
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def _wish(self, step: int) -> int:
        if self._worker.stop_requested:
            return LEAVE
        if self.stop_asked:
            return END_FIT
        if self._saver.is_due(step):
            return SAVE
        return REGROUP if self._worker.is_chief and self._regrouping.change_is_due else 0

    def _commit(self, step: Step, stats: StepStats) -> None:
        progress = self._training.progress
        progress.epoch_loss += stats.loss * stats.rows
        progress.epoch_rows += stats.rows
        if self._settings.scheduler_every == "step" and not stats.skipped:
            self._advance_schedule({})
        self._training.step_done(step, stats, self.total_steps)
        self._regrouping.step_done()
        self._garbage.release()
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

    def _leave(self) -> None:
        step = self._training.progress.step
        self._save("checkpoint before leaving", required=True)
        raise Preempted(f"Stopped on request after step {step}; the checkpoint of that step is committed.")
