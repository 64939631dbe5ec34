"""`fit` where workers train on stretches of batches by themselves, and servers apply each stretch as one step.

The run's steps are batches, as ever: an update takes it past as many as the stretch had. Everything else is as in
`ServedFit`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from manyhands.data.batches import Step
from manyhands.events import RoundsClosed
from manyhands.parameter_server.engine.local_steps_engine import Stretched
from manyhands.parameter_server.loop.leased_source import ServedFit
from manyhands.parameter_server.protocol.interval import Course
from manyhands.parameter_server.protocol.leases import Held
from manyhands.parameter_server.protocol.local_step_ranges import Stretches
from manyhands.parameter_server.protocol.messages import Done
from manyhands.strategies.base import StepStats

__all__ = ["StretchedFit"]


class StretchedFit(ServedFit):
    """Epochs end with everybody at the agreed weights, and so does `fit`."""

    _stretches = Stretches(1, 1, 0, 1)

    def run(self) -> list[dict[str, float]]:
        self._shared: Counter[int] = Counter()
        try:
            return super().run()
        finally:
            if self._engine.has_rounds:
                rounds = {workers: steps // workers for workers, steps in self._shared.items()}
                self._worker.emit(RoundsClosed(step=self._training.progress.step, rounds=rounds))

    @property
    def _engine(self) -> Stretched:
        engine = self._training.engine
        assert isinstance(engine, Stretched)
        return engine

    def _loop(self) -> None:
        super()._loop()
        self._engine.come_together()

    def _end_epoch(self) -> None:
        super()._end_epoch()
        self._engine.come_together()

    def _next_course(self) -> Course | None:
        course = super()._next_course()
        if course is None:
            return None
        self._stretches = Stretches(self._engine.every, course.first, course.last, self._engine.updates + 1)
        return self._stretches.course(course)

    def _next_due(self) -> int | None:
        """With the end of a stretch: one that validation cut short would train something else."""
        due, step, every = super()._next_due(), self._training.progress.step, self._engine.every
        return None if due is None else step - (step - due) // every * every

    def _do(self, work: Held, version: int) -> None:
        self._engine.train_stretch(self._each(self._stretches.batches(work.step)), work)

    def _each(self, batches: range) -> Iterator[Step]:
        for number in batches:
            self._announce(number)
            self._worker.report(number, "training")
            yield self._steps.batches.at(number)

    def _hear(self, done: Done) -> None:
        """A stretch was applied. The n-th batch that counts is the run's n-th step, whichever it was."""
        self._staleness[done.staleness] += 1
        self._shared[done.together] += 1
        for number in self._stretches.batches(done.step):
            step, batch = self._steps.batches.at(self._training.progress.step + 1), self._steps.batches.at(number)
            self._announce(step.number)
            stats = StepStats(
                loss=done.loss,
                rows=batch.rows,
                seconds=self._engine.take_times(),
                staleness=done.staleness,
                batch=batch.number,
                start=(batch.epoch, batch.start),
                together=done.together if self._engine.has_rounds else None,
                lr=float(self._training.optimizer.param_groups[0]["lr"]),
            )
            self._commit(step, stats)
