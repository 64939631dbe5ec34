"""How loader processes are started and ended: stop signals are not for them, their worker ends them.

A signal that reaches every process of a job must not take the data away from a worker that still has to reach the end
of its step for a checkpoint. Since a loader process therefore ignores SIGTERM, `terminate` is SIGKILL here.
"""

from __future__ import annotations

from multiprocessing import context, popen_spawn_posix, process, resource_tracker
from typing import Any

from manyhands import signals

__all__ = ["LoaderContext"]


class _Popen(popen_spawn_posix.Popen):
    def _launch(self, process_obj: Any) -> None:
        with signals.held_back():  # until `end_with_parent`, after seconds of imports
            super()._launch(process_obj)  # type: ignore[misc]

    def terminate(self) -> None:
        self.kill()


class _Process(context.SpawnProcess):
    @staticmethod
    def _Popen(process_obj: process.BaseProcess) -> Any:  # noqa: N802
        return _Popen(process_obj)


class LoaderContext(context.SpawnContext):
    """Of multiprocessing, for torch's DataLoader and process pools. Makes the process that cleans up after others."""

    Process = _Process

    def __init__(self) -> None:
        super().__init__()
        with signals.held_back():  # it ignores SIGTERM and SIGINT by itself, but SIGUSR1 would end it
            resource_tracker.ensure_running()
