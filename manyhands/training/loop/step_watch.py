"""Events about committed steps: each step with its speed, the resources this worker used, and which workers are slow.

One observer of steps that has the clock, the resource meter and the straggler tracker. Nothing here decides about the
training, except for the division of slices among workers (`StepWatch.division`). Start reading at
`StepWatch.step_done`.
"""

from __future__ import annotations

import time

from manyhands.data.batches import Step
from manyhands.data.sample_order import SliceDivision
from manyhands.events import StepDone
from manyhands.strategies.base import StepStats
from manyhands.training.state.training_state import TrainingState
from manyhands.training.step.resource_meter import Predicted, ResourceMeter
from manyhands.training.step.stragglers import StragglerTracker, report_pace

__all__ = ["StepWatch"]

# Weight of the newest step in the moving average of the speed.
SMOOTHING = 0.1


class StepWatch:
    """One object for a training, over all of its calls."""

    def __init__(self, training: TrainingState, pacing: StragglerTracker, predicted: Predicted | None) -> None:
        self._training, self._worker, self._pacing = training, training.worker, pacing
        self._meter = ResourceMeter(self._worker.rank, self._worker.world_size)
        self._meter.predicted = predicted
        self._step_s = 0.0
        self._total_steps: int | None = None
        self.restart_clock()

    @property
    def division(self) -> SliceDivision:
        """How slices are divided among workers from the next step on."""
        return self._pacing.division

    def begin(self, total_steps: int | None) -> None:
        """The steps of a call begin; `total_steps` is the run's step number when they end."""
        self._total_steps = total_steps
        self.restart_clock()
        self._meter.start()

    def restart_clock(self) -> None:
        """Do not count the time until now in the next step."""
        self._done_at = time.perf_counter()

    def step_done(self, step: Step, stats: StepStats) -> None:
        total_steps, now = self._total_steps, time.perf_counter()
        took_s, self._done_at = now - self._done_at, now
        self._step_s = took_s if not self._step_s else self._step_s + SMOOTHING * (took_s - self._step_s)
        stats.samples_per_s = stats.rows / self._step_s
        self._worker.events.emit(
            StepDone(
                time_s=time.time(),
                step=step.number,
                epoch=step.epoch - self._training.progress.call_epoch,
                loss=stats.loss,
                rows=stats.rows,
                samples_per_s=stats.samples_per_s,
                phases=stats.seconds,
                lr=stats.lr,
                grad_norm=stats.grad_norm,
                eta_s=(total_steps - step.number) * self._step_s if total_steps is not None else None,
                total_steps=total_steps,
                took_s=took_s,
                start=stats.start or (step.epoch, step.start),
                generation=self._worker.group.generation,
                staleness=stats.staleness,
                batch=stats.batch,
                together=stats.together,
                turn=getattr(step, "turn", None),
            )
        )
        is_leased = stats.staleness is not None  # then any worker computes a slice
        self._meter.add(stats, 0 if is_leased else len(step.indices))
        if self._meter.due(now):
            self._report_used()
        verdict = self._pacing.add(step.shares, self._training.slices, stats.times)
        if verdict is not None:
            report_pace(self._worker, step.number, verdict)

    def regrouped(self) -> None:
        """This worker's rank, or the number of workers, has changed."""
        self._meter.move(self._worker.rank, self._worker.world_size)
        self._pacing.regrouped(self._worker.num_replicas)

    def end(self) -> None:
        """The steps of a call have ended, also by an error."""
        self._report_used(ended=True)

    def _report_used(self, *, ended: bool = False) -> None:
        used = self._meter.used(self._training.progress.step, ended=ended)
        if used is not None:
            self._worker.events.emit_own(used)
