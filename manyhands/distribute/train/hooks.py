"""Hooks of a session, with TensorFlow 1's methods, and the stock ones.

A hook's `before_run` may ask for more values than the user does; `after_run` gets them. Start reading at
`SessionRunHook`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import manyhands as mh
from manyhands.errors import NonFinite, SpecError
from manyhands.spec.keyword_check import checked_class

if TYPE_CHECKING:
    from manyhands.distribute.train.saver import WeightsSaver
    from manyhands.distribute.train.session import MonitoredTrainingSession

__all__ = [
    "CheckpointSaverHook",
    "LoggingTensorHook",
    "NanTensorHook",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "StepCounterHook",
    "StopAtStepHook",
    "SummarySaverHook",
]


KEEP_ALL = 10**9


@checked_class()
class SessionRunArgs(NamedTuple):
    """What a hook asks for beside the user's fetches."""

    fetches: Any


@checked_class()
class SessionRunValues(NamedTuple):
    """What a hook gets: `results` has the structure of its fetches."""

    results: Any


@checked_class()
class SessionRunContext:
    """One call of `run`, for hooks."""

    def __init__(self, original_args: SessionRunArgs, session: MonitoredTrainingSession) -> None:
        self.original_args, self.session, self.stop_requested = original_args, session, False

    def request_stop(self) -> None:
        """End the training of all workers: after one more step, which all of them take."""
        self.stop_requested = True


@checked_class()
class SessionRunHook:
    """Called around every `run` of a session: subclass it."""

    def begin(self) -> None:
        """The session begins."""

    def after_create_session(self, session: Any, coord: Any) -> None:
        """The model is set up, from the newest checkpoint if there is one."""

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Before each run; what is returned is fetched, too."""
        return None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """After each run."""

    def end(self, session: Any) -> None:
        """The session ends without an error."""


@checked_class()
class StopAtStepHook(SessionRunHook):
    """Ends the training of all workers exactly at a step.

    Args:
        num_steps: The number of steps of this session.
        last_step: The same: the steps of a run are counted from its start, also where it was resumed.
    """

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        if (num_steps is None) == (last_step is None):
            raise SpecError("Either num_steps or last_step is needed.", where="StopAtStepHook", fix=["last_step=1000"])
        self.last_step = int((num_steps if last_step is None else last_step) or 0)
        if self.last_step < 1:
            raise SpecError(f"The last step is {self.last_step}.", where="StopAtStepHook", fix=["last_step=1000"])


@checked_class()
class CheckpointSaverHook(SessionRunHook):
    """When the session's run saves checkpoints: `mh.Checkpoints`.

    Args:
        checkpoint_dir: Must be the session's; the run's directory.
        save_secs: Save after so many seconds.
        save_steps: Save at multiples of so many steps. One of the two.
        saver: A `Saver`, for its `max_to_keep`.
    """

    def __init__(
        self,
        checkpoint_dir: str | Path,
        save_secs: float | None = None,
        save_steps: int | None = None,
        saver: WeightsSaver | None = None,
    ) -> None:
        if (save_secs is None) == (save_steps is None):
            raise SpecError(
                "Either save_secs or save_steps is needed.", where="CheckpointSaverHook", fix=["save_secs=600"]
            )
        self.checkpoint_dir = Path(checkpoint_dir)
        keep = 3 if saver is None else saver.max_to_keep or KEEP_ALL
        self.checkpoints = mh.Checkpoints(every_s=save_secs, every_steps=save_steps, keep_last=keep)


class _Timer:
    """Whether it is time again, by steps or by seconds."""

    def __init__(self, where: str, every_steps: int | None, every_secs: float | None) -> None:
        if (every_steps is None) == (every_secs is None):
            raise SpecError("Either a number of steps or of seconds is needed.", where=where, fix=["100 steps"])
        if not (every_steps or every_secs or 0) > 0:
            raise SpecError(
                f"{every_steps if every_secs is None else every_secs} is no interval.", where=where, fix=["100 steps"]
            )
        self._steps, self._secs = every_steps, every_secs
        self.step: int | None = None
        self.at = 0.0

    def due(self, step: int) -> tuple[float, int] | None:
        """The seconds and steps since the last time; None while it is not time."""
        now = time.monotonic()
        if self.step is not None:
            since, steps = now - self.at, step - self.step
            if (steps < self._steps) if self._steps is not None else (since < (self._secs or 0.0)):
                return None
        else:
            since, steps = 0.0, 0
        self.step, self.at = step, now
        return since, steps


@checked_class()
class LoggingTensorHook(SessionRunHook):
    """Prints values every so many steps or seconds, each worker its own.

    Args:
        tensors: What to fetch, by name, or a list: `{"loss": train_op.loss}`.
        every_n_iter: Steps between two lines.
        every_n_secs: Or seconds.
        at_end: Only False.
        formatter: A function of the dict of values that returns the line.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any] | Sequence[Any],
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        at_end: bool = False,
        formatter: Callable[[Mapping[str, Any]], str] | None = None,
    ) -> None:
        if at_end:
            raise SpecError(
                "at_end would fetch after the last step.", where="LoggingTensorHook", fix=["SessionRunHook.end"]
            )
        self._tensors = dict(tensors) if isinstance(tensors, Mapping) else {str(one): one for one in tensors}
        self._timer = _Timer("LoggingTensorHook", every_n_iter, every_n_secs)
        self._formatter = formatter

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs(self._tensors)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        step = run_context.session.global_step
        passed = self._timer.due(step)
        if passed is None:
            return
        if self._formatter is not None:
            print(self._formatter(run_values.results), flush=True)
            return
        text = ", ".join(f"{name} = {_shown(value)}" for name, value in run_values.results.items())
        print(f"{text}, step = {step}" + (f" ({passed[0]:.3f} sec)" if passed[1] else ""), flush=True)


@checked_class()
class NanTensorHook(SessionRunHook):
    """Ends the training at a loss that is not finite.

    Args:
        loss_tensor: What to look at: `train_op.loss`. A step's own loss is always looked at, before the update.
        fail_on_nan_loss: True: raise. False: end all workers' training as if the data had ended; no update was made.
    """

    def __init__(self, loss_tensor: Any, fail_on_nan_loss: bool = True) -> None:
        self._tensor, self.fails = loss_tensor, fail_on_nan_loss

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs(self._tensor)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if math.isfinite(float(run_values.results)):
            return
        if self.fails:
            raise NonFinite(f"The loss of step {run_context.session.global_step} is {float(run_values.results)}.")
        run_context.request_stop()


@checked_class()
class StepCounterHook(SessionRunHook):
    """Counts steps per second: prints them, and records them as `global_step_per_sec` in the run's events.

    Args:
        every_n_steps: Steps between two values.
        every_n_secs: Or seconds, with `every_n_steps=None`.
    """

    def __init__(self, every_n_steps: int | None = 100, every_n_secs: float | None = None) -> None:
        self._timer = _Timer("StepCounterHook", every_n_steps, every_n_secs)
        self.rates: list[float] = []
        """The values so far."""

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        passed = self._timer.due(run_context.session.global_step)
        if passed is not None and passed[1]:
            self.rates.append(passed[1] / max(passed[0], 1e-9))
            run_context.session.hands.log(global_step_per_sec=self.rates[-1])
            if run_context.session.hands.is_chief:
                print(f"global_step/sec: {self.rates[-1]:.6g}", flush=True)


@checked_class()
class SummarySaverHook(SessionRunHook):
    """TensorBoard summaries of loss, and of the values of `summary_op`, by the chief: `mh.TensorBoardHook`.

    Args:
        save_steps: Steps between two points.
        output_dir: Where to write. Default: `summaries` in the run's directory.
        summary_op: Values by name, each something to fetch. Default: the loss alone.
    """

    def __init__(
        self,
        save_steps: int = 100,
        output_dir: str | Path | None = None,
        summary_op: Mapping[str, Any] | None = None,
    ) -> None:
        self._values = dict(summary_op or {})
        self._writer = mh.TensorBoardHook(output_dir, every=1)
        self._timer = _Timer("SummarySaverHook", save_steps, None)

    def after_create_session(self, session: Any, coord: Any) -> None:
        if session.hands.is_chief:
            self._writer.begin(SimpleNamespace(home=session.hands.run_dir))

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs(self._values)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        session = run_context.session
        if not session.hands.is_chief or self._timer.due(session.global_step) is None:
            return
        self._writer.after_step(session, session.global_step, SimpleNamespace(loss=session.hands.loss, seconds={}))
        if run_values.results:
            self._writer.after_validation(session, {n: float(v) for n, v in run_values.results.items()})

    def end(self, session: Any) -> None:
        self._writer.end(session, None)


def _shown(value: Any) -> str:
    try:
        return f"{float(value):.6g}"
    except (TypeError, ValueError):
        return str(value)
