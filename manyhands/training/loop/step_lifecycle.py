"""The life of every step of one call, for the trainer and for user loops: it is computed, committed once, and followed
by what all workers do after it.

A loop provides how a step is computed, and how the remaining workers complete it after one was lost. What is done when
workers join, leave, are lost or have copies that differ is here, and nowhere else: this is the only caller of
regrouping, divergence repair and saver while steps are taken. Start reading at `StepLifecycle.take`, `commit` and
`after`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NoReturn, TypeVar

import msgspec

from manyhands.data.batches import Batches, Step
from manyhands.errors import MemoryChanged, PeerLost, Preempted
from manyhands.parallel.replicas.divergence import CopiesDiffer, WrongGradient
from manyhands.strategies.base import StepStats
from manyhands.training.elastic.recovery_decision import RecoveryOutcome
from manyhands.training.elastic.regroup import Regroup
from manyhands.training.loop.divergence_repair import DivergenceRepair
from manyhands.training.loop.fit_history import FitHistory, FitSettings
from manyhands.training.loop.step_watch import StepWatch
from manyhands.training.state.checkpointing import Saver
from manyhands.training.state.training_state import TrainingState
from manyhands.training.step.pipeline_report import report_pipeline
from manyhands.training.step.step_requests import (
    CHECKPOINT_HOOKS,
    END_FIT,
    LEAVE,
    REGROUP,
    SAVE,
    SAVE_AND_VALIDATE,
    VALIDATE,
    saves,
)

__all__ = ["StepLifecycle"]

T = TypeVar("T")


class StepLifecycle:
    """One call of `fit`, or one user loop, which has neither `settings` of a history nor hooks.

    `make_batches` returns the steps that follow the state of `training`, for this worker's rank in its group.
    """

    def __init__(
        self,
        training: TrainingState,
        watch: StepWatch,
        make_batches: Callable[[], Batches],
        saver: Saver,
        regrouping: Regroup,
        settings: FitSettings | None = None,
    ) -> None:
        self.training, self.saver = training, saver
        self._watch, self._make_batches, self._regrouping = watch, make_batches, regrouping
        self._worker, self._hooks, self._garbage = training.worker, training.hooks, training.garbage
        self._repair = DivergenceRepair(training, saver)
        self._batches: Batches | None = make_batches()
        self.total_steps = self._batches.total_steps
        self.history = FitHistory(training, settings, self.total_steps, saver.best) if settings is not None else None
        self.observers: list[Callable[[Step, StepStats], None]] = [watch.step_done]
        """Called with every step that this worker commits, in this order."""
        self.end_requested = False
        """User code has requested that no worker takes a further step."""
        self.group = ""
        """The generation whose workers divided the current step, and agree on what follows it."""
        self._change_from: str | None = None
        """The generation whose workers have agreed to change to a newer one."""
        self._announced = self._observed = 0
        self._checkpoints_announced: set[int] = set()

    def begin(self) -> bool:
        """Whether steps follow: `fit` may have ended before it was resumed, or before this worker was admitted."""
        self._watch.begin(self.total_steps)
        self.training.keep()
        rows = self.training.engine.served_rows
        if rows is not None and not rows.is_open:  # it is open where this worker joined a running call
            self.agreed(lambda: rows.open(self._worker.axis, self.training.progress.step))
        self._garbage.begin()
        if self.history is None:
            return True
        return not self.training.progress.ended and not (self.history.is_open and self.after_received())

    @property
    def batches(self) -> Batches:
        """For this worker's current rank; made again after a change of the group."""
        if self._batches is None:
            self._batches = self._make_batches()
        return self._batches

    # ---- a step that all workers take together ----

    def next(self) -> Step | None:
        """The next step for this worker in its current group; None after the last."""
        self.change_group()
        while True:
            self.batches.divide(self._watch.division)
            self._garbage.hold()
            try:
                return next(self.batches, None)
            except PeerLost as lost:  # workers exchange rows here, where some do not have all data
                self._recover(lost)

    def begin_step(self, step: Step) -> int:
        """Announce a step, and return what this worker requests to be done after it (`step_requests`)."""
        self.announce(step.number)
        self._worker.report(step.number, "training")
        self._regrouping.division = self.group = self._worker.group.generation
        return self._request(step.number)

    def announce(self, number: int) -> None:
        """Call the hooks before a step. Once: not again for a step that is repeated."""
        if number > self._announced:
            self._announced = number
            self._hooks.call("before_step", number)

    def _request(self, step: int) -> int:
        engine, history = self.training.engine, self.history
        if self._worker.stop_requested:
            return LEAVE
        if self.end_requested:
            return END_FIT
        validate = history is not None and history.is_time_for_row and engine.round_closes_with(step)
        if self.saver.is_due(step):
            return SAVE_AND_VALIDATE if validate else SAVE
        if not self._worker.is_chief or not engine.round_closes_with(step):
            return 0
        if validate:
            return VALIDATE
        if self.change_is_due:
            return REGROUP
        return CHECKPOINT_HOOKS if self.saver.committed and self._hooks.listen_to("on_checkpoint") else 0

    def take(
        self, step: Step, compute: Callable[[], StepStats | None], complete: Callable[[], StepStats | None]
    ) -> StepStats | None:
        """Compute and commit a step; if a worker is lost in it, the remaining ones `complete` it.

        None: it is not committed. Either `compute` or `complete` has returned None, with slices left to do; or the step
        starts over, because the workers' copies of the state differed, or not all had begun it when one was lost.
        """
        attempt = compute
        while True:
            try:
                stats = self._attempt(attempt)
            except CopiesDiffer as differ:
                self._make_copies_equal(differ)
                return None
            except PeerLost as lost:
                outcome = self._recover(lost)
                if outcome.received:  # another worker has committed it, and sent its state
                    assert self.training.last_stats is not None
                    self._committed(step, self.training.last_stats)
                    return self.training.last_stats
                if not (outcome.same_step and self.training.in_step.can_finish_step):
                    self._regrouping.division = ""
                    return None
                attempt = complete
            else:
                if stats is not None:
                    self.commit(step, stats)
                return stats

    def _attempt(self, compute: Callable[[], StepStats | None]) -> StepStats | None:
        try:
            return compute()
        except WrongGradient as wrong:
            raise self._repair.expose(wrong) from None
        except MemoryChanged:
            self._repair.distrust_last()
            raise

    def _recover(self, lost: PeerLost) -> RecoveryOutcome:
        """Change to a group without the lost workers; in a static run there is none, and `lost` is raised."""
        if not self._worker.is_elastic:
            raise lost
        self._garbage.release()
        return self._regrouping.switch_generation()

    def _make_copies_equal(self, differ: CopiesDiffer) -> None:
        """Repair the copies; then the step starts over. If a worker is lost here, that step compares them again."""
        self._regrouping.division = ""
        try:
            self._repair.settle(differ)
        except PeerLost as lost:
            self._recover(lost)
        self._close_batches()

    # ---- a step that is computed, in lockstep or by servers ----

    def commit(self, step: Step, stats: StepStats) -> None:
        """Advance the training past this step: schedule, progress, observers, hooks. Once per step on each worker."""
        training, progress = self.training, self.training.progress
        if self.history is not None:
            self.history.count(stats)
        else:
            progress.results = {"loss": stats.loss}
        if self.schedules_steps and not stats.skipped:
            training.advance_schedule()
        training.advance(step, stats)
        for observe in self.observers:
            observe(step, stats)
        self._regrouping.step_done()
        if training.engine.round_closed:
            training.keep()
        self._garbage.release()
        self._committed(step, stats)

    @property
    def schedules_steps(self) -> bool:
        """Whether the learning rate scheduler is stepped after every step; otherwise after every epoch."""
        return self.history is None or self.history.scheduler_every == "step"

    def _committed(self, step: Step, stats: StepStats) -> None:
        """After a commit by this worker, or by one whose state it received: servers of embedding rows apply it, hooks
        are called."""
        rows = self.training.engine.served_rows
        if rows is not None:
            self.agreed(lambda: rows.settle(self._worker.axis))
        if step.number > self._observed:  # hooks are not called again for a step that was rolled back and repeated
            self._observed = step.number
            self._hooks.call("after_step", step.number, stats)

    def after(self, stop: int, *, last_of_epoch: bool = False) -> bool:
        """Do what all workers agreed on with a committed step: `stop` is the largest request. True: no step follows."""
        training = self.training
        if self.history is None:
            training.progress.ended = stop == END_FIT
        elif self.history.end_interval(stop, last_of_epoch=last_of_epoch):
            self._watch.restart_clock()
            if self.history.has_new_best:
                self.save("best checkpoint")
            training.keep()
        if stop == LEAVE:
            self._leave()
        if self._repair.is_due:
            self.agreed(self._repair.compare_parts)
        self._start_save(stop)
        if stop == CHECKPOINT_HOOKS:
            self._announce_checkpoints()
        self._change_from = self.group if stop == REGROUP else None
        return training.progress.ended

    def after_received(self) -> bool:
        """As `after`, for a step that other workers took and whose state this worker received."""
        assert self.training.last_stats is not None
        self.group = ""
        last_of_epoch = self.history is not None and self.history.is_epoch_open
        return self.after(self.training.last_stats.stop, last_of_epoch=last_of_epoch)

    # ---- collectives between steps ----

    def agreed(self, work: Callable[[], T]) -> T:
        """Run a collective `work`, again if a worker is lost in it, until every worker has its result."""
        return self._regrouping.agreed(work)

    @property
    def change_is_due(self) -> bool:
        """Whether this worker is the chief and should request that all workers change to another group."""
        return self._worker.is_chief and self._regrouping.change_is_due

    def change_group(self) -> None:
        """Change to the newer group if all workers have agreed on that; it admits the workers that wait to join.

        Here, not after the step: collectives that a user loop calls between steps are among the workers that took the
        step.
        """
        # If a worker was lost since, all have changed already, and there may be no newer group. If there is one, the
        # chief requests the change again.
        if self._change_from == self._worker.group.generation:
            self._regrouping.change()

    def regrouped(self) -> None:
        """This worker may have other slices from now on. Leased slices can be any: prefetched ones are kept."""
        self.saver.become_chief()
        if not self._worker.strategy.leases:
            self._close_batches()

    def save(self, what: str, *, required: bool = False) -> None:
        """Save a checkpoint; every worker waits for it."""

        def work() -> None:
            self.saver.save_now(required=required)
            self._worker.wait_for_chief(what)

        self.agreed(work)
        if self.history is not None:
            self._announce_checkpoints()

    def _start_save(self, stop: int) -> None:
        """Start a save if `stop` requests it, and report saves that have ended."""
        save = saves(stop)
        if self._worker.strategy.leases:
            # An interval also ends where a save is due by the number of steps, without a request. The chief gets the
            # servers' state without the other workers.
            self.saver.after_step(save=save or self.saver.is_save_step(self.training.progress.step))
        elif save and self.training.saves_together:
            self.agreed(lambda: self.saver.after_step(save=True))
        elif save or self.saver.ended:
            self.saver.after_step(save=save)

    def _leave(self) -> NoReturn:
        """End the run after a stop request, with a checkpoint."""
        step = self.training.progress.step
        self.save("checkpoint before leaving", required=True)
        raise Preempted(f"Stopped on request after step {step}; the checkpoint of that step is committed.")

    def _announce_checkpoints(self) -> None:
        """Call hooks with the checkpoints that the chief has committed since the last time. Collective."""
        mine = msgspec.msgpack.encode(self.saver.committed)
        found = self.agreed(lambda: self._worker.axis.all_gather_bytes("checkpoints", mine))
        self.saver.committed = []
        for data in found:
            self._call_checkpoint_hooks(msgspec.msgpack.decode(data, type=list[tuple[int, str]]))

    def report_saves(self) -> None:
        """Report saves that have ended, on this worker only, between two of its steps. Hooks of the other workers are
        called at the next synchronisation, which may be much later."""
        self.saver.report_ended()
        self._call_checkpoint_hooks(self.saver.committed)

    def _call_checkpoint_hooks(self, checkpoints: Iterable[tuple[int, str]]) -> None:
        for step, path in checkpoints:
            if step not in self._checkpoints_announced:
                self._checkpoints_announced.add(step)
                self._hooks.call("on_checkpoint", step, path)

    # ---- the end ----

    def compare_last(self) -> None:
        """Compare copies after the last step, since no later step does. Collective."""
        for compare in self._repair.last_comparisons():
            self.agreed(compare)

    def report_layout(self) -> None:
        """Report the times of the last step in a pipeline. Collective."""
        self.agreed(self._report_pipeline)

    def _report_pipeline(self) -> None:
        spread = getattr(self.training.engine, "spread", None)
        if spread is not None and spread.divided.passes is not None:
            report_pipeline(self._worker, spread.divided.passes.runner, self.training.progress.step)

    def end(self) -> None:
        """No step follows in this call: it is done, or an error was raised."""
        self._garbage.end()
        self.training.forget()
        self._watch.end()

    def close(self) -> None:
        self._close_batches()
        self.saver.close()

    def _close_batches(self) -> None:
        if self._batches is not None:
            self._batches.close()
            self._batches = None
