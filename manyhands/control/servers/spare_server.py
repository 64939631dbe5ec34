"""A server that is ready before it is needed: it has run the script, and takes the number of a server that dies.

There is at most one. It is started once the run is training, because the CPUs are needed for start-up until then, and
has low priority while it is not needed. If it dies, another one is started, later each time; the run does not depend
on it. Start reading at `SpareServer.take` and `SpareServer.keep`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from manyhands.control.messages.status_messages import ServerStatus
from manyhands.control.processes.cpu_priority import hold_back
from manyhands.control.processes.worker_process import WorkerProcess
from manyhands.spec.worker_identity import SPARE

__all__ = ["READY", "SpareServer", "wait_s"]

# A run that ends earlier does not need one.
FIRST_WAIT_S = 3.0
LONGEST_WAIT_S = 600.0
READY = "ready"
"""The phase of a spare that can take over at once."""


def wait_s(deaths: int) -> float:
    """How long after the run has begun to train, or after a spare's death, the next one is started."""
    return float(min(FIRST_WAIT_S * 2**deaths, LONGEST_WAIT_S))


class SpareServer:
    def __init__(self, start: Callable[[int, int], WorkerProcess], next_incarnation: Callable[[], int]) -> None:
        """`start(number, incarnation)` starts a server process."""
        self._start, self._next_incarnation = start, next_incarnation
        self.is_wanted = False
        self.process: WorkerProcess | None = None
        self._deaths = 0
        """Since a spare was last used."""
        self._due_at: float | None = None

    def take(self) -> WorkerProcess | None:
        """Take the spare, if there is one. One that is not ready yet is still ahead of a new process."""
        taken, self.process = self.process, None
        if taken is not None:
            self._deaths = 0
        return taken

    def keep(self, servers: Collection[WorkerProcess], now: float) -> None:
        """Start a spare when it is due; `servers` are those that it could replace."""
        if not self.is_wanted or self.process is not None:
            return
        if not servers or not all(server.alive and server.step for server in servers):
            return  # the run is not training
        if self._due_at is None:
            self._due_at = now + wait_s(self._deaths)
        if now >= self._due_at:
            self.process = self._start(SPARE, self._next_incarnation())
            hold_back(self.process.pid)

    def note_death(self, now: float) -> None:
        """The spare died before it was used."""
        self._deaths, self.process = self._deaths + 1, None
        self._due_at = now + wait_s(self._deaths)

    def status(self, now: float) -> ServerStatus | None:
        spare = self.process
        if spare is None:
            return None
        state = READY if spare.phase == READY else "starting"
        return ServerStatus(server=SPARE, pid=spare.pid, status=state, phase="", age_s=now - spare.heard_at)
