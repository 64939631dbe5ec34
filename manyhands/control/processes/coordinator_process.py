"""The agent's handle of the coordinator: a child process that is restarted when it dies."""

from __future__ import annotations

import time

import msgspec

from manyhands.control.coordinator.process import CoordinatorConfig
from manyhands.control.processes.child_process import ChildProcess
from manyhands.errors import ManyhandsError

__all__ = ["CoordinatorProcess"]

# This many quick deaths in a row mean that restarting it does not help.
MAX_QUICK_DEATHS = 5
QUICK_S = 5.0


class CoordinatorProcess(ChildProcess):
    def __init__(self, config: CoordinatorConfig) -> None:
        self._quick_deaths = 0
        self.restarts = 0
        super().__init__("manyhands.control.coordinator.process", msgspec.msgpack.encode(config))

    def restart(self, *, worked: bool = False) -> None:
        """It died, or hangs: kill it and start another. Raises if that evidently does not help.

        `worked`: it sent orders before it died, so it is able to start.
        """
        quick = time.monotonic() - self.started_at < QUICK_S and not worked
        self._quick_deaths = self._quick_deaths + 1 if quick else 0
        self.kill()
        if self._quick_deaths >= MAX_QUICK_DEATHS:
            stderr = self.tail.decode(errors="replace")
            raise ManyhandsError(f"The coordinator died {self._quick_deaths} times in a row. Its last output: {stderr}")
        self.restarts += 1
        self.start()
