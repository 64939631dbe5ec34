"""A hook that ends a training early, as a signal would."""

from __future__ import annotations

from typing import Any


class StopAt:
    """Behaves like a SIGTERM to the launcher in the middle of step `step`."""

    def __init__(self, step: int | None) -> None:
        self._step = step

    def before_step(self, trainer: Any, step: int) -> None:
        if step == self._step:
            trainer._run.worker.session.stop_requested = "preempt"
