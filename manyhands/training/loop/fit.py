"""One call of `fit`, and the training loop in which all workers take each step together.

What a step does is decided by the strategy, what is done around it by `step_lifecycle`, what is recorded by
`fit_history`.
Start reading at `LockstepSource.train`.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

from manyhands.errors import Preempted
from manyhands.training.loop.step_lifecycle import StepLifecycle

__all__ = ["LockstepSource", "StepSource", "run_fit"]


class StepSource(Protocol):
    """Where the steps of a call of `fit` come from: `LockstepSource`, or `LeasedSource` under parameter servers."""

    def train(self) -> None:
        """Take all steps that are left."""

    def close(self) -> None: ...


class LockstepSource:
    """Every worker takes its slices of every step."""

    def __init__(self, lifecycle: StepLifecycle) -> None:
        self._lifecycle = lifecycle

    def train(self) -> None:
        lifecycle, engine, garbage = self._lifecycle, self._lifecycle.training.in_step, self._lifecycle.training.garbage
        if not lifecycle.begin():
            return
        while (step := lifecycle.next()) is not None:
            stop = lifecycle.begin_step(step)
            compute = partial(engine.train_step, step, stop=stop, collect=garbage.wanted)
            stats = lifecycle.take(step, compute, complete=engine.resume_step)
            # Without stats the step is not committed, and its slices are divided again.
            if stats is not None and lifecycle.after(stats.stop, last_of_epoch=step.last_of_epoch):
                return

    def close(self) -> None:
        pass


def run_fit(lifecycle: StepLifecycle, source: StepSource, *, resumed: bool) -> list[dict[str, float]]:
    """Train from the current step on, calling the hooks; returns the rows of the history.

    `resumed`: the run was resumed inside this call, or joined in it, so its first checkpoint exists.
    """
    training, hooks, worker = lifecycle.training, lifecycle.training.hooks, lifecycle.training.worker
    error: BaseException | None = None
    try:
        hooks.call("begin")
        training.restore_hooks()
        if not resumed:
            lifecycle.save("first checkpoint", required=True)
        source.train()
        worker.report(training.progress.step, "ending")  # also where no step was left to do
        worker.end_trial()
        lifecycle.compare_last()
        lifecycle.report_layout()
        lifecycle.save("end of fit", required=True)
    except BaseException as raised:
        error = raised
        _call_failure_hooks(lifecycle, raised)
        raise
    finally:
        lifecycle.end()
        hooks.call("end", error)
        lifecycle.close()
        source.close()
    return training.progress.history


def _call_failure_hooks(lifecycle: StepLifecycle, error: BaseException) -> None:
    """A stop on request is no failure. An exception of a hook must not hide the one that it was called for."""
    if not isinstance(error, Exception) or isinstance(error, Preempted):
        return
    try:
        lifecycle.training.hooks.call("on_failure", error)
    except Exception as raised:
        error.add_note(f"A hook's on_failure raised {type(raised).__name__}: {raised}")
