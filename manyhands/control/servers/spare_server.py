"""A server that is ready before it is needed: it has run the script, and waits for the number of one that dies.

There is at most one. It is begun once the run is training, as start-up has better uses for processors, and held back
while nobody waits for it. One that dies is followed by another, later each time; the run does not depend on it.
Start reading at `Spare.take` and `Spare.keep`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from manyhands.control.messages.status_messages import ServerStatus
from manyhands.control.processes.cpu_priority import hold_back
from manyhands.control.processes.worker_process import Worker
from manyhands.spec.worker_identity import SPARE

__all__ = ["READY", "Spare", "wait_s"]

# A run that ends before has had no use for one.
FIRST_WAIT_S = 3.0
LONGEST_WAIT_S = 600.0
READY = "ready"
"""The phase of one that can take over at once."""


def wait_s(deaths: int) -> float:
    """How long after the run has begun to train, or after a spare's death, the next one is started."""
    return float(min(FIRST_WAIT_S * 2**deaths, LONGEST_WAIT_S))


class Spare:
    def __init__(self, start: Callable[[int, int], Worker], next_incarnation: Callable[[], int]) -> None:
        """`start` makes a process of a server's number and an incarnation."""
        self._start, self._next_incarnation = start, next_incarnation
        self.is_wanted = False
        self.process: Worker | None = None
        self._deaths = 0
        """Since one was of use."""
        self._due_at: float | None = None

    def take(self) -> Worker | None:
        """The spare, if there is one, and none from now on. One that is not ready is still ahead of any other."""
        taken, self.process = self.process, None
        if taken is not None:
            self._deaths = 0
        return taken

    def keep(self, servers: Collection[Worker], now: float) -> None:
        """Start one when it is due; `servers` are those that it would stand in for."""
        if not self.is_wanted or self.process is not None:
            return
        if not servers or not all(server.alive and server.step for server in servers):
            return  # the run is not training
        if self._due_at is None:
            self._due_at = now + wait_s(self._deaths)
        if now >= self._due_at:
            self.process = self._start(SPARE, self._next_incarnation())
            hold_back(self.process.pid)

    def bury(self, now: float) -> None:
        """It has died without ever having been of use."""
        self._deaths, self.process = self._deaths + 1, None
        self._due_at = now + wait_s(self._deaths)

    def status(self, now: float) -> ServerStatus | None:
        spare = self.process
        if spare is None:
            return None
        standing = READY if spare.phase == READY else "starting"
        return ServerStatus(server=SPARE, pid=spare.pid, status=standing, phase="", age_s=now - spare.heard_at)
