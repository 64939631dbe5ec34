"""User loops in which all workers take every step together: each worker computes its slices, then all take the step.

`LockstepSource` calls an engine to compute the slices of a step; here user code computes them, between our calls. So if
a worker is lost in a step, or copies differ, the loop yields more slices. Where parameter servers lease slices,
`LeasedOwnLoop` is used instead. Start reading at `LockstepOwnLoop.slices`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from typing import Any

from manyhands.data.batches import Step
from manyhands.errors import PeerLost, UsageError
from manyhands.strategies.base import SliceLike, StepStats
from manyhands.training.loop.step_lifecycle import StepLifecycle
from manyhands.training.step import worker_means
from manyhands.training.worker.worker import Worker

__all__ = ["LockstepOwnLoop"]


class LockstepOwnLoop:
    """For each of `slices`: `backward`, then `step`. One object for all loops of a run, used in turn."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._context: AbstractContextManager[None] | None = None
        self._todo: list[int] = []
        """Slices of the current step that this worker has yet to compute."""
        self.starts_over = False
        """The current step is not committed: `next_step` returns it again, with slices that may be others."""
        self._lost: PeerLost | None = None
        self._means = 0
        self._last_step: Step | None = None
        self._has_idle = False
        """Some worker had no slice in the last step."""
        self.loss = float("nan")
        """The loss of the last step, over its whole batch."""

    def slices(self, lifecycle: StepLifecycle) -> Generator[SliceLike, None, None]:
        """Yield this worker's slices of all steps, each with its buffers, randomness and precision until `backward`."""
        self.begin(lifecycle)
        while (step := self.next_step()) is not None:
            yield from self.slices_of(step)

    # The same step by step, for a loop that another library runs.

    def begin(self, lifecycle: StepLifecycle) -> None:
        self._lifecycle, self._engine = lifecycle, lifecycle.training.in_step
        self._is_over = self._has_idle = False
        lifecycle.begin()

    def next_step(self) -> Step | None:
        """The next step, on every worker; None after the last."""
        self._end_means()
        return None if self._is_over else self._lifecycle.next()

    def slices_of(self, step: Step) -> Generator[SliceLike, None, None]:
        """This worker's slices of one step, which is committed after the last one, unless it `starts_over`."""
        self._begin(step)
        pieces: Iterator[SliceLike] = step.mine()
        if not self._todo:
            self._finish()
        try:
            while self._todo and not self.starts_over:
                for piece in pieces:
                    self._engine.phases.mark("load")
                    self._piece, self._context = piece, self._engine.slice_context(piece)
                    self._context.__enter__()
                    yield piece
                    if self.starts_over:
                        break
                pieces = map(step.slice, list(self._todo))
        finally:
            self._leave_slice()

    def _begin(self, step: Step) -> None:
        self._step, self.starts_over, self._lost = step, False, None
        stop = self._lifecycle.begin_step(step)
        self._engine.begin_step(step, stop=stop, collect=self._lifecycle.training.garbage.wanted)
        self._todo, self._computed = list(step.indices), list(step.indices)

    def _leave_slice(self) -> None:
        if self._context is not None:
            context, self._context = self._context, None
            context.__exit__(None, None, None)

    def backward(self, result: Any) -> None:
        self._leave_slice()
        self._engine.phases.mark("forward")
        try:
            self._engine.backward(self._piece, result)
        except PeerLost as lost:
            if not self._worker.is_elastic:
                raise
            self._lost = lost  # `step` recovers from it
        self._engine.phases.mark("backward")

    def step(self) -> bool:
        """Whether this was the worker's last slice of the step, and it is committed."""
        self._todo.remove(self._piece.index)
        return (not self._todo or self._lost is not None) and self._finish()

    def _finish(self) -> bool:
        """Whether the step is committed. If not, this worker has slices of lost workers to do, or it starts over."""
        self._todo = []
        stats = self._lifecycle.take(self._step, self._end_step, self._complete)
        if stats is None:
            self.starts_over = not self._todo
            return False
        self._last_step, self._means, self.loss = self._step, 0, stats.loss
        self._has_idle = self._worker.is_elastic and worker_means.lacks_slices(self._step)
        self._is_over = self._lifecycle.after(stats.stop)
        return True

    def _end_step(self) -> StepStats:
        if self._lost is not None:
            raise self._lost
        return self._engine.end_step()

    def _complete(self) -> StepStats | None:
        """After a worker was lost in the step: None if this worker has slices of the lost one to do first."""
        self._lost = None
        self._todo = self._engine.lost_slices()
        self._computed = [*self._computed, *self._todo]
        return None if self._todo else self._engine.end_step()

    def mean(self, value: float) -> float:
        """The mean over the workers that had a slice in the last step, weighted by their rows."""
        if self._last_step is None:
            raise UsageError("mean was called before a step.", fix=["hands.mean(value) after hands.step()"])
        step = self._last_step
        if self._worker.is_elastic:
            found = self._mean_of_living(value)
            assert found is not None, "this worker has given a value"
            return found
        self._means += 1
        timeout_s = self._worker.resolved.spec.comm.timeout_s
        return worker_means.of_all(self._worker, step, f"mean/{step.number}/{self._means}", value, timeout_s)

    def _mean_of_living(self, value: float | None) -> float | None:
        """The mean over all live workers; None if no worker gives a value. Collective."""
        assert self._last_step is not None
        rows = worker_means.rows_of(self._last_step, self._computed)
        return self._lifecycle.agreed(lambda: worker_means.of_living(self._worker.axis, rows, value))

    def _end_means(self) -> None:
        """A worker that had no slice in the step does not run the loop's body: it joins the other workers' collectives
        for `mean` until they begin the next step."""
        has_idle, self._has_idle = self._has_idle, False
        if has_idle:
            while self._mean_of_living(None) is not None:
                assert not self._computed, "workers that had a slice call mean equally often"
