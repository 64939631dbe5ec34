"""The steps of one call, for the trainer and for a loop of the user's own alike: where they come from, and what is done
when workers come, go, die or differ while they are under way.

What a loop does with a step is `fit_history`'s business, or the user's in `own_loop`. Start reading at `Steps.next`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import msgspec

from manyhands.data.batches import Batches, Step
from manyhands.errors import PeerLost, Preempted
from manyhands.parallel.replicas.divergence import CopiesDiffer
from manyhands.parameter_server.engine.served import Served
from manyhands.strategies.base import StepStats
from manyhands.training.elastic.recovery_decision import Arrival
from manyhands.training.elastic.regroup import Regrouping
from manyhands.training.loop.divergence_repair import Checking
from manyhands.training.state.checkpointing import Saver
from manyhands.training.state.training_state import Training
from manyhands.training.step.step_requests import END_FIT, LEAVE, REGROUP, SAVE, SAVE_AND_VALIDATE, TELL, VALIDATE

__all__ = ["Steps"]


class Steps:
    """`make_batches` gives the steps from wherever `training` stands, for this worker's place in its group."""

    def __init__(
        self, training: Training, make_batches: Callable[[], Batches], saver: Saver, regrouping: Regrouping
    ) -> None:
        self._training, self._make_batches, self.saver, self._regrouping = training, make_batches, saver, regrouping
        self._worker, self._garbage = training.worker, training.garbage
        self.checking = Checking(training, saver, regrouping)
        self._batches: Batches | None = make_batches()
        self.total_steps = self._batches.total_steps
        self.after_save: Callable[[], None] = lambda: None
        """Called on every worker after a save that all have waited for."""

    def begin(self) -> None:
        self._training.start_clock()
        self._training.meter.start()
        self._training.keep()
        self._open_rows()
        self._garbage.begin()

    def _open_rows(self) -> None:
        """Where servers have rows of embeddings and nothing else. A newcomer finds that done."""
        rows = self._training.engine.served_rows
        if rows is not None and not rows.is_open:
            self._regrouping.agreed(lambda: rows.open(self._worker.axis, self._training.progress.step))

    @property
    def batches(self) -> Batches:
        """As they are for this worker now."""
        if self._batches is None:
            self._batches = self._make_batches()
            self.total_steps = self._batches.total_steps
        return self._batches

    def next(self) -> Step | None:
        """The next step for this worker, however its group has changed; None after the last."""
        while True:
            self.batches.divide(self._training.pacing.division)
            self._garbage.hold()
            try:
                return next(self.batches, None)
            except PeerLost as lost:  # rows that some workers lack are sent around here
                self.recover(lost)

    def wish(self, step: int, *, end: bool = False, validate: bool = False) -> int:
        """What this worker wants done after a step; asked before it. Only the chief asks to `validate`."""
        if self._worker.stop_requested:
            return LEAVE
        if end:
            return END_FIT
        validate = validate and self._training.engine.round_closes_with(step)
        if self.saver.is_due(step):
            return SAVE_AND_VALIDATE if validate else SAVE
        if not self._worker.is_chief or not self._training.engine.round_closes_with(step):
            return 0
        if validate:
            return VALIDATE
        if self._regrouping.change_is_due:
            return REGROUP
        return TELL if self.saver.committed and self._training.hooks.listen_to("on_checkpoint") else 0

    def done(self, step: Step, stats: StepStats) -> None:
        """The step is committed."""
        self._training.step_done(step, stats, self.total_steps)
        self._regrouping.step_done()
        if self._training.engine.round_closed:
            self._training.keep()
        self._garbage.release()

    def settle_rows(self) -> None:
        """After a step that this worker has committed, or received: have the servers of rows apply it."""
        rows = self._training.engine.served_rows
        if rows is not None:
            self._regrouping.agreed(lambda: rows.settle(self._worker.axis))

    def after_step(self, *, save: bool) -> None:
        """Start the save that the workers agreed on, and tell of those that have ended."""
        self.checking.after_step()
        if save and self._training.saves_together:  # every worker has a part in it
            self._regrouping.agreed(lambda: self.saver.after_step(save=True))
        else:
            self.saver.after_step(save=save)

    def recover(self, lost: PeerLost) -> Arrival:
        """Go over to a group without those who are lost; in a static run there is none."""
        if not self._worker.is_elastic:
            raise lost
        self._garbage.release()
        return self._regrouping.go_over()

    def settle(self, differ: CopiesDiffer) -> None:
        """Make copies the same again; the step begins anew. If somebody is lost meanwhile, it compares them again."""
        self._regrouping.division = ""
        try:
            self.checking.settle(differ)
        except PeerLost as lost:
            self.recover(lost)
        self._close_batches()

    def save(self, what: str, *, required: bool = False) -> None:
        """Save, and have everybody wait for it."""

        def work() -> None:
            self.saver.save_now(required=required)
            self._worker.wait_for_chief(what)

        self._regrouping.agreed(work)
        self.after_save()

    def take_committed(self) -> list[tuple[int, str]]:
        """Checkpoints that the chief has committed since this was last asked. For all workers alike."""
        mine = msgspec.msgpack.encode(self.saver.committed)
        said = self._regrouping.agreed(lambda: self._worker.axis.all_gather_bytes("checkpoints", mine))
        self.saver.committed = []
        return [commit for data in said for commit in msgspec.msgpack.decode(data, type=list[tuple[int, str]])]

    def leave(self) -> NoReturn:
        """End the run here, on request."""
        step = self._training.progress.step
        self.save("checkpoint before leaving", required=True)
        raise Preempted(f"Stopped on request after step {step}; the checkpoint of that step is committed.")

    def regrouped(self) -> None:
        """This worker has other slices from now on. Where they are leased, any: who reads them ahead goes on."""
        self.saver.take_office()
        if not isinstance(self._training.engine, Served):
            self._close_batches()

    def end(self) -> None:
        """No more steps, for whatever reason."""
        self._garbage.end()
        self._training.forget()
        self._training.tell_used(ended=True)

    def close(self) -> None:
        self._close_batches()
        self.saver.close()

    def _close_batches(self) -> None:
        if self._batches is not None:
            self._batches.close()
            self._batches = None
