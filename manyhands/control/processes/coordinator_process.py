"""The coordinator as its agent sees it: a child that is started again when it dies."""

from __future__ import annotations

import time

import msgspec

from manyhands.control.coordinator.process import CoordinatorConfig
from manyhands.control.processes.child_process import Child
from manyhands.errors import ManyhandsError

__all__ = ["CoordinatorProcess"]

# This often in a row, at once, means that starting it again does not help.
MAX_QUICK_DEATHS = 5
QUICK_S = 5.0


class CoordinatorProcess(Child):
    def __init__(self, config: CoordinatorConfig) -> None:
        self._quick_deaths = 0
        self.restarts = 0
        super().__init__("manyhands.control.coordinator.process", msgspec.msgpack.encode(config))

    def restart(self, *, worked: bool = False) -> None:
        """It died, or hangs: end it for good and start another. Raises when that plainly does not help.

        `worked`: it gave orders before it died, so whatever killed it, starting it is not in vain.
        """
        quick = time.monotonic() - self.started_at < QUICK_S and not worked
        self._quick_deaths = self._quick_deaths + 1 if quick else 0
        self.kill()
        if self._quick_deaths >= MAX_QUICK_DEATHS:
            said = self.tail.decode(errors="replace")
            raise ManyhandsError(f"The coordinator died {self._quick_deaths} times in a row. It said: {said}")
        self.restarts += 1
        self.start()
