"""How loader processes start and end: they ignore stop signals, their worker ends them.

A signal that reaches every process of a job must not end the loaders of a worker that still has to finish its step for
a checkpoint. Because a loader process ignores SIGTERM, `terminate` sends SIGKILL.
"""

from __future__ import annotations

from multiprocessing import context, popen_spawn_posix, process, resource_tracker
from typing import Any

from manyhands import signals

__all__ = ["LoaderContext"]


class _Popen(popen_spawn_posix.Popen):
    def _launch(self, process_obj: Any) -> None:
        with signals.held_back():  # until `_end_with_parent`, after seconds of imports
            super()._launch(process_obj)  # type: ignore[misc]

    def terminate(self) -> None:
        self.kill()


class _Process(context.SpawnProcess):
    @staticmethod
    def _Popen(process_obj: process.BaseProcess) -> Any:  # noqa: N802
        return _Popen(process_obj)


class LoaderContext(context.SpawnContext):
    """A multiprocessing context for torch's DataLoader and process pools. Starts the resource tracker."""

    Process = _Process

    def __init__(self) -> None:
        super().__init__()
        with signals.held_back():  # the tracker ignores SIGTERM and SIGINT, but SIGUSR1 would end it
            resource_tracker.ensure_running()
