"""A loop of the user's own under parameter servers: slices one after the other, as servers lease them.

`ServedFit` takes work and computes it; here the user's code computes, and it comes by between any two slices. All that
is ours runs inside `step`: the push, asking for the next slice, hearing of updates, and meetings. Start reading at
`LeasedLoop._leases`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from manyhands.comm.axis import Axis
from manyhands.data.batches import Step
from manyhands.data.evaluation import eval_pieces
from manyhands.data.sources.as_source import Source
from manyhands.errors import UsageError
from manyhands.events import StalenessSeen, Warned
from manyhands.parameter_server.loop.leased_source import REOPEN, ServedFit
from manyhands.parameter_server.memory.optimizer_states import settings_of
from manyhands.parameter_server.protocol.interval import Course
from manyhands.parameter_server.protocol.messages import Values
from manyhands.strategies.base import LossFn, MetricFn, PieceLike, StepStats
from manyhands.training.elastic.regroup import Regrouping
from manyhands.training.loop.fit_history import FitSettings
from manyhands.training.loop.step_lifecycle import Steps
from manyhands.training.setup.user_model import floats_of
from manyhands.training.state.training_state import Training
from manyhands.training.step import evaluation, worker_means

__all__ = ["LeasedLoop", "refuse_apart"]


class LeasedLoop(ServedFit):
    """For each of `slices`: `backward`, then `step`. The same duties around updates as `ServedFit`, but for epochs."""

    def __init__(self, training: Training, steps: Steps, regrouping: Regrouping) -> None:
        settings = FitSettings(scheduler_every="step", early_stop=None, validate=None, goes_on=True)
        super().__init__(None, training, steps, regrouping, settings)
        self._staleness: Counter[int] = Counter()
        self._parts = self._leases()
        self._rows = 0
        self._values: Values = []
        self._known: list[dict[str, Any]] = []
        """The optimizer's settings as servers have them."""
        self._is_changed = False
        self.loss = float("nan")
        """Of the last update that this worker has heard of."""

    def slices(self) -> Iterator[PieceLike]:
        self._steps.begin()
        try:
            next(self._parts, None)
            while (piece := next(self._parts, None)) is not None:
                self._rows = piece.rows
                yield piece
        finally:
            self._parts.close()
            self._worker.emit(StalenessSeen(step=self._training.progress.step, updates=dict(self._staleness)))

    def backward(self, result: Any) -> None:
        self._parts.send(result)

    def step(self) -> bool:
        """Push, and have the next slice; whether there were updates meanwhile."""
        before, self._values = self._training.progress.step, []
        self._is_changed |= settings_of(self._training.optimizer) != self._known
        next(self._parts, None)
        return self._training.progress.step > before

    def mean(self, value: float) -> float:
        """Of this value and of those that others have told last."""
        place = len(self._values)
        self._values.append((self._rows, value))
        self._engine.values = self._values
        return worker_means.weighted(told[place] for told in (self._values, *self._engine.others) if len(told) > place)

    def evaluate(
        self, source: Source, batch_size: int, loss: LossFn, metrics: Mapping[str, MetricFn]
    ) -> dict[str, float]:
        """By this worker alone, between two slices: of the weights that it has for the next one."""
        worker = self._worker
        worker.report(self._training.progress.step, "evaluating")
        seed, device = worker.resolved.spec.run.seed, worker.device
        floats = floats_of(worker.resolved.spec.train.precision)
        pieces = eval_pieces(
            source, batch_size=batch_size, rank=0, world_size=1, seed=seed, device=device, floats=floats
        )
        with self._engine.using_loss(loss):
            return evaluation.evaluate(self._engine, Axis(0, 1), pieces, metrics)[0]

    def leave(self) -> bool:
        """The user's code has left the loop by `break`; whether others are still in it."""
        worker = self._worker
        if worker.world_size == 1:
            return False
        self._engine.leave()
        text = f"Rank {worker.rank} has left its loop by `break`: the others go on without it, to the next meeting. "
        worker.tell(Warned(text=f"{text}hands.request_stop() ends the loop on every worker."))
        return True

    def _leases(self) -> Generator[PieceLike | None, Any, None]:
        """As `Served.computing` gives the parts of one lease, those of all; from one meeting to the next."""
        while (course := self._next_course()) is not None:
            if not self._enter(course):
                if self._after_their_meeting():
                    return
                continue
            why, group = (yield from self._until_meeting()), self._worker.group.generation
            if self._after_meeting(why):
                return
            self._go_over(why, group)

    def _until_meeting(self) -> Generator[PieceLike | None, Any, int]:
        """Why all workers have met."""
        for work, version in self._given_work():
            self._worker.report(work.step, "training")
            yield from self._engine.computing(self._steps.batches.at(work.step), work, version)
        return self._why

    def _open(self, course: Course) -> None:
        super()._open(course)
        self._known, self._is_changed = settings_of(self._training.optimizer), False

    def _wish(self) -> int:
        """Servers take over what the user has changed of the optimizer, on the chief, when a course begins."""
        return super()._wish() or (REOPEN if self._worker.is_chief and self._is_changed else 0)

    def _commit(self, step: Step, stats: StepStats) -> None:
        training = self._training
        if training.scheduler is not None:
            training.scheduler.step()
            self._known = settings_of(training.optimizer)
        self._steps.done(step, stats)
        training.progress.results, self.loss = {"loss": stats.loss}, stats.loss


def refuse_apart(what: str, *, in_loop: bool, was_left: bool) -> None:
    """Where servers lease slices, workers are together before and after the loop, and nowhere in it."""
    if in_loop:
        raise UsageError(
            f"{what} needs all workers, but servers lease slices to each as it comes: in the loop over batches() they "
            "are at different places.",
            fix=[
                "hands.mean(value), which waits for nobody and has what each worker has said last",
                f"hands.{what}(...) after the loop; for every epoch, a loop with epochs=1 each",
                'mh.ParameterServer(mode="hybrid")',
            ],
        )
    if was_left:
        raise UsageError(
            f"{what} needs all workers, but this one has left its loop by `break`, and others are still in theirs.",
            fix=["hands.request_stop() in place of `break`: it ends the loop on every worker"],
        )
