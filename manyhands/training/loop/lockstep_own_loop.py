"""A loop of the user's own where all workers take every step together: one slice after the other, then the step.

`Fit` computes the slices of a step; here the user's code does, between any two of our calls. So a step that loses a
worker, or whose copies differ, hands the loop more slices instead of computing them. Under servers that lease slices it
is `LeasedLoop`. Start reading at `SteppedLoop.slices`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from manyhands.data.batches import Step
from manyhands.errors import MemoryChanged, PeerLost, UsageError
from manyhands.parallel.replicas.divergence import CopiesDiffer
from manyhands.strategies.base import PieceLike, StepStats
from manyhands.training.elastic.regroup import Regrouping
from manyhands.training.loop.step_lifecycle import Steps
from manyhands.training.state.training_state import Training
from manyhands.training.step import worker_means
from manyhands.training.step.step_requests import END_FIT, LEAVE, REGROUP, SAVE

__all__ = ["SteppedLoop"]


class SteppedLoop:
    """For each of `slices`: `backward`, then `step`. One object for all loops of a run, one after the other."""

    def __init__(self, training: Training, regrouping: Regrouping, timeout_s: float) -> None:
        self._training, self._regrouping, self._timeout_s = training, regrouping, timeout_s
        self._worker = training.worker
        self._context: AbstractContextManager[None] | None = None
        self._todo: list[int] = []
        self._anew = False
        self._lost: PeerLost | None = None
        self._means = 0
        self._last_step: Step | None = None
        self._is_over = self._has_idle = False
        self._left_at = ""
        """The group that took a step after which all should go over to a newer one."""
        self.stop_asked = False
        self.loss = float("nan")
        """Of the last step, over its whole batch."""

    def slices(self, taken: Steps) -> Iterator[PieceLike]:
        """This worker's, of all steps; in each its buffers, randomness and precision until `leave_slice`."""
        engine = self._training.in_step
        self._taken, self._is_over, self._left_at, self.stop_asked = taken, False, "", False
        self._has_idle = False
        taken.begin()
        while (step := self._next()) is not None:
            self._begin(step)
            pieces = step.mine()
            if not self._todo:
                self._finish()
            while self._todo and not self._anew:
                for piece in pieces:
                    engine.phases.mark("load")
                    self._piece, self._context = piece, engine.slice_context(piece)
                    self._context.__enter__()
                    yield piece
                    if self._anew:
                        break
                pieces = map(step.slice, list(self._todo))

    def _next(self) -> Step | None:
        """Newcomers are admitted here, not after the step: what the user's code asks all workers for between steps, it
        asks those who took the step."""
        self._end_means()
        # If members went over meanwhile, there may be no newer group; if there is, the chief will say so again.
        if self._left_at == self._worker.group.generation:
            self._regrouping.change()
        return None if self._is_over else self._taken.next()

    def _begin(self, step: Step) -> None:
        self._step, self._anew, self._lost = step, False, None
        self._worker.report(step.number, "training")
        self._regrouping.division = self._began_in = self._worker.group.generation
        stop = self._taken.wish(step.number, end=self.stop_asked)
        self._training.in_step.begin_step(step, stop=stop, collect=self._training.garbage.wanted)
        self._todo, self._computed = list(step.indices), list(step.indices)

    @property
    def number(self) -> int:
        """Of the step under way."""
        return self._step.number

    def leave_slice(self) -> None:
        if self._context is not None:
            context, self._context = self._context, None
            context.__exit__(None, None, None)

    def backward(self, result: Any) -> None:
        engine = self._training.in_step
        self.leave_slice()
        engine.phases.mark("forward")
        try:
            engine.backward(self._piece, result)
        except PeerLost as lost:
            if not self._worker.is_elastic:
                raise
            self._lost = lost  # `step` sees to it
        engine.phases.mark("backward")

    def step(self) -> bool:
        """Whether this was the worker's last slice of the step, and it is committed."""
        self._todo.remove(self._piece.index)
        return (not self._todo or self._lost is not None) and self._finish()

    def mean(self, value: float) -> float:
        """Over the workers that had a slice in the last step, weighted by their rows."""
        if self._last_step is None:
            raise UsageError("mean was called before a step.", fix=["hands.mean(value) after hands.step()"])
        step = self._last_step
        if self._worker.is_elastic:
            found = self._say(value)
            assert found is not None, "this worker said a value"
            return found
        self._means += 1
        return worker_means.of_all(self._worker, step, f"mean/{step.number}/{self._means}", value, self._timeout_s)

    def _say(self, value: float | None) -> float | None:
        """With all living workers: their mean, or None where nobody says a value."""
        assert self._last_step is not None
        rows = worker_means.rows_of(self._last_step, self._computed)
        return self._regrouping.agreed(lambda: worker_means.of_living(self._worker.axis, rows, value))

    def _end_means(self) -> None:
        """Who had no slice in the step does not run the loop's body: it hears the others' means until they go on."""
        has_idle, self._has_idle = self._has_idle, False
        if has_idle:
            while self._say(None) is not None:
                assert not self._computed, "who had a slice goes on when the others do"

    def _finish(self) -> bool:
        """Whether the step is committed. If not, there are slices of lost workers to do, or it begins anew."""
        training, self._todo = self._training, []
        while True:
            try:
                if self._lost is not None:
                    raise self._lost
                stats = training.in_step.end_step()
            except MemoryChanged:
                self._taken.checking.distrust_last()
                raise
            except CopiesDiffer as differ:
                self._anew = True
                self._taken.settle(differ)
                return False
            except PeerLost as lost:
                self._lost = None
                arrival = self._taken.recover(lost)
                if arrival.received:  # others have committed it
                    assert training.last_stats is not None
                    self._after_step(training.last_stats)
                    return True
                if not (arrival.same_step and training.in_step.can_go_on):
                    self._anew = True
                    return False
                self._todo = training.in_step.lost_slices()
                self._computed = [*self._computed, *self._todo]
                if self._todo:
                    return False
            else:
                self._commit(stats)
                return True

    def _commit(self, stats: StepStats) -> None:
        training = self._training
        training.progress.results = {"loss": stats.loss}
        if training.scheduler is not None and not stats.skipped:
            training.scheduler.step()
        self._taken.done(self._step, stats)
        self._after_step(stats)

    def _after_step(self, stats: StepStats) -> None:
        self._last_step, self._means, self.loss = self._step, 0, stats.loss
        self._has_idle = self._worker.is_elastic and worker_means.lacks_slices(self._step)
        self._taken.settle_rows()
        if stats.stop == LEAVE:
            self._taken.leave()
        self._taken.after_step(save=stats.stop == SAVE)
        self._is_over = stats.stop == END_FIT
        self._left_at = self._began_in if stats.stop == REGROUP else ""
