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
from manyhands.errors import Preempted
from manyhands.events import EpochDone
from manyhands.runtime.hooks import EarlyStop
from manyhands.runtime.saving import Saver
from manyhands.runtime.training import Training
from manyhands.strategies.base import StepStats

__all__ = ["END_FIT", "LEAVE", "SAVE", "Fit", "FitSettings"]

# What workers tell each other with every step; the largest wins. Each includes those before it: whoever ends, saves.
SAVE, END_FIT, LEAVE = 1, 2, 3


class FitSettings(msgspec.Struct, kw_only=True):
    scheduler_every: str
    early_stop: EarlyStop | None
    validate: Callable[[], dict[str, float]] | None
    goes_on: bool
    """The run was resumed inside this call, so its first checkpoint is there."""


class Fit:
    """Runs the loop from wherever `training` stands. `trainer` is what hooks are handed."""

    def __init__(self, trainer: Any, training: Training, batches: Batches, saver: Saver, settings: FitSettings) -> None:
        self._trainer, self._training, self._batches = trainer, training, batches
        self._saver, self._settings = saver, settings
        self._worker, self._hooks = training.worker, training.hooks
        self.stop_asked = False

    def run(self) -> list[dict[str, float]]:
        error: BaseException | None = None
        try:
            self._hooks.call("begin", self._trainer)
            self._training.restore_hooks()
            if not self._settings.goes_on:
                self._saver.save_now(required=True)
            self._worker.wait_for_chief("first checkpoint")
            self._loop()
            self._worker.end_trial()
            self._saver.save_now()
            self._worker.wait_for_chief("end of fit")
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._training.tell_used(ended=True)
            self._hooks.call("end", self._trainer, error)
            self._batches.close()
            self._saver.close()
        return self._training.progress.history

    def _loop(self) -> None:
        self._training.start_clock()
        self._training.meter.start()
        asked_at = time.perf_counter()
        for step in self._batches:
            waited_s = time.perf_counter() - asked_at
            self._hooks.call("before_step", self._trainer, step.number)
            self._worker.session.report(step.number, "training")
            stats = self._training.engine.train_step(step, stop=self._wish(step.number))
            stats.seconds["load"] += waited_s
            self._commit(step, stats)
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
            asked_at = time.perf_counter()

    def _wish(self, step: int) -> int:
        if self._worker.stop_requested:
            return LEAVE
        if self.stop_asked:
            return END_FIT
        return SAVE if self._saver.is_due(step) else 0

    def _commit(self, step: Step, stats: StepStats) -> None:
        progress = self._training.progress
        progress.epoch_loss += stats.loss * stats.rows
        progress.epoch_rows += stats.rows
        if self._settings.scheduler_every == "step" and not stats.skipped:
            self._advance_schedule({})
        self._training.step_done(step, stats, self._batches.total_steps)
        self._hooks.call("after_step", self._trainer, step.number, stats)

    def _end_epoch(self) -> None:
        progress, settings = self._training.progress, self._settings
        epoch = progress.epoch - 1 - progress.call_epoch
        trained = progress.epoch_loss / max(progress.epoch_rows, 1)
        progress.epoch_loss, progress.epoch_rows = 0.0, 0
        results: dict[str, float] = {"epoch": epoch, "step": progress.step, "loss": trained}
        if settings.validate is not None:
            self._worker.session.report(progress.step, "validating")
            validated = settings.validate()
            results |= {f"val_{name}": value for name, value in validated.items()}
            progress.results = {**validated, "train_loss": trained}
        else:
            progress.results = {"loss": trained}
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
        self._saver.save_now(required=True)
        self._worker.wait_for_chief("checkpoint before leaving")
        raise Preempted(f"Stopped on request after step {step}; the checkpoint of that step is committed.")
