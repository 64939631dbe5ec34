"""A user loop with parameter servers: slices one after the other, as servers lease them.

`LeasedSource` requests leases and computes them in `fit`; here the user's code computes each slice. Everything else
runs inside `step`: the push, the request for the next slice, commits of updates, and sync points. Start reading at
`LeasedOwnLoop.slices`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from manyhands.comm.axis import Axis
from manyhands.data.batches import Step
from manyhands.data.evaluation import eval_pieces
from manyhands.data.sources.as_source import Source
from manyhands.errors import UsageError
from manyhands.events import Warned
from manyhands.parameter_server.loop.leased_source import LeasedSource
from manyhands.parameter_server.memory.optimizer_states import settings_of
from manyhands.parameter_server.protocol.messages import Values
from manyhands.strategies.base import LossFn, MetricFn, SliceLike, StepStats
from manyhands.training.loop.step_lifecycle import StepLifecycle
from manyhands.training.setup.user_model import floats_of
from manyhands.training.step import evaluation, worker_means

__all__ = ["LeasedOwnLoop", "refuse_unsynchronised"]


class LeasedOwnLoop:
    """For each of `slices`: `backward`, then `step`."""

    def __init__(self, lifecycle: StepLifecycle) -> None:
        self._lifecycle, self._training = lifecycle, lifecycle.training
        self._worker, self._source = lifecycle.training.worker, LeasedSource(lifecycle)
        self._engine, self._parts = self._source.engine, self._computing()
        self._rows = 0
        self._values: Values = []
        self._settings: list[dict[str, Any]] = []
        """The optimizer's settings, as they were when the user's code could last change them."""
        self.loss = float("nan")
        """The loss of the last update that this worker has committed."""
        lifecycle.observers.append(self._committed)

    def slices(self) -> Generator[SliceLike, None, None]:
        self._lifecycle.begin()
        try:
            next(self._parts, None)
            self._settings = settings_of(self._training.optimizer)
            while (piece := next(self._parts, None)) is not None:
                self._rows = piece.rows
                yield piece
        finally:
            self._parts.close()
            self._source.close()

    def _computing(self) -> Generator[SliceLike | None, Any, None]:
        """Yields for all leases what `LeasedEngine.computing` yields for one."""
        for lease, version in self._source.leases():
            self._worker.report(lease.step, "training")
            yield from self._engine.computing(self._lifecycle.batches.at(lease.step), lease, version)

    def backward(self, result: Any) -> None:
        self._parts.send(result)

    def step(self) -> bool:
        """Push the gradient, and get the next slice; returns whether servers made updates meanwhile."""
        training, self._values = self._training, []
        before, settings = training.progress.step, settings_of(training.optimizer)
        if settings != self._settings:  # servers receive the chief's changed settings when the next interval begins
            self._source.reopens, self._settings = True, settings
        next(self._parts, None)
        if training.scheduler is not None:
            self._settings = settings_of(training.optimizer)
        return training.progress.step > before

    def _committed(self, step: Step, stats: StepStats) -> None:
        self.loss = stats.loss

    def mean(self, value: float) -> float:
        """The mean of this value and of the last values of the other workers."""
        index = len(self._values)
        self._values.append((self._rows, value))
        self._engine.values = self._values
        given = (self._values, *self._engine.others)
        return worker_means.weighted(values[index] for values in given if len(values) > index)

    def evaluate(
        self, source: Source, batch_size: int, loss: LossFn, metrics: Mapping[str, MetricFn]
    ) -> dict[str, float]:
        """Evaluate on this worker alone, between two slices, with the weights for the next one."""
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
        """The user's code has left the loop by `break`; returns whether other workers are still in it."""
        worker = self._worker
        if worker.world_size == 1:
            return False
        self._engine.leave()
        text = f"Rank {worker.rank} has left its loop by `break`: the others continue to the next sync point. "
        worker.events.emit_own(Warned(text=f"{text}hands.request_stop() ends the loop on every worker."))
        return True


def refuse_unsynchronised(what: str, *, in_loop: bool, was_left: bool) -> None:
    """Where servers lease slices, workers are synchronised before and after the loop, and nowhere in it."""
    if in_loop:
        raise UsageError(
            f"{what} needs all workers, but servers lease slices to each worker on request: in the loop over batches() "
            "the workers are at different steps.",
            fix=[
                "hands.mean(value), which waits for no worker and uses the last value of each",
                f"hands.{what}(...) after the loop; for every epoch, a loop with epochs=1 each",
                'mh.ParameterServer(mode="hybrid")',
            ],
        )
    if was_left:
        raise UsageError(
            f"{what} needs all workers, but this one has left its loop by `break`, and others are still in theirs.",
            fix=["hands.request_stop() in place of `break`: it ends the loop on every worker"],
        )
