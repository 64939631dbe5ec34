"""This host's parameter servers in one attempt: started with it, restarted when one dies, ended after the workers.

A server is in no group, so its death changes no generation and frees no shared memory: the next process with its
number finds both unchanged. `HostServers` handles processes and clocks; `HostWorkers` decides when they end. Start
reading at `HostServers.fill`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from manyhands.control.membership.failure_policy import cannot_be_retried
from manyhands.control.messages.agent_messages import FailedServer
from manyhands.control.messages.failure import WorkerEnd
from manyhands.control.messages.status_messages import ServerStatus
from manyhands.control.processes.cpu_priority import let_go
from manyhands.control.processes.worker_process import WorkerProcess
from manyhands.control.servers.spare_server import SpareServer

__all__ = ["HostServers", "ServerLife", "is_hopeless"]

QUICK_DEATHS = 3
QUICK_S = 10.0
# As for workers: a server that got this far did not die of its start-up.
QUICK_STEPS = 10


class ServerLife(NamedTuple):
    """The life of one process with a server's number."""

    seconds: float
    steps: int
    """Steps that it served."""

    @property
    def is_short(self) -> bool:
        return self.seconds < QUICK_S and self.steps < QUICK_STEPS


def is_hopeless(end: WorkerEnd, lives: Sequence[ServerLife]) -> bool:
    """Whether the next process with this number would end in the same way; `lives`: of all that had it, in order."""
    last = lives[-QUICK_DEATHS:]
    return (
        cannot_be_retried(end)
        or "ServerStateLost" in end.bases
        or (len(last) == QUICK_DEATHS and all(life.is_short for life in last))
    )


class HostServers:
    def __init__(
        self, start: Callable[[int, int], WorkerProcess], appoint: Callable[[WorkerProcess, int], None]
    ) -> None:
        """`start(number, incarnation)` starts a server process; `appoint` assigns a number to a spare one."""
        self._start, self._appoint = start, appoint
        self.spare = SpareServer(start, self._next_incarnation)
        self._wanted: Sequence[int] = ()
        self._current: dict[int, WorkerProcess] = {}
        """By number: the wanted servers, and those that are not wanted any more and have not left yet."""
        self._gone: list[WorkerProcess] = []
        """Ended, but their descendants may still be alive."""
        self._lives: dict[int, list[ServerLife]] = {}
        self._newest = 0
        self._hopeless: WorkerProcess | None = None
        self._kill_at: float | None = None
        self.asked_to_end = False
        self._ending = False
        """No server is started any more."""

    @property
    def processes(self) -> list[WorkerProcess]:
        """Servers that are alive or have live descendants, and the last one of each number."""
        spare = [self.spare.process] if self.spare.process is not None else []
        return [*self._gone, *self._current.values(), *spare]

    def member(self, incarnation: int) -> WorkerProcess | None:
        """The live server with this incarnation, whose messages are accepted."""
        return next((one for one in self.processes if one.identity.incarnation == incarnation and one.alive), None)

    def want(self, numbers: Sequence[int]) -> None:
        """Set which servers there should be. Others hand over their state and exit with code 0."""
        self._wanted = numbers
        for number, server in self._current.items():
            server.may_end = number not in numbers or self.asked_to_end

    def fill(self) -> None:
        """Start a process for each number that has none; also for a server that should leave, but died instead."""
        for swept in [server for server in self._gone if server.cleared]:
            swept.log.close()
            self._gone.remove(swept)
        if self._ending or self._hopeless is not None:
            return
        died = [number for number, server in self._current.items() if server.failed_at is not None]
        for number in [number for number, server in self._current.items() if not server.alive]:
            self._gone.append(self._current.pop(number))
        for number in sorted({*self._wanted, *died} - self._current.keys()):
            self._current[number] = self._take_spare(number) or self._start(number, self._next_incarnation())
            self._current[number].may_end = number not in self._wanted

    def _take_spare(self, number: int) -> WorkerProcess | None:
        spare = self.spare.take()
        if spare is not None:
            self._appoint(spare, number)
            spare.is_held_back = not let_go(spare.pid)
        return spare

    def _keep_spare(self, now: float) -> None:
        for server in self._current.values():
            if server.is_held_back:
                server.is_held_back = not let_go(server.pid)
        if not self._ending and self._hopeless is None:
            self.spare.keep(self._current.values(), now)

    def _next_incarnation(self) -> int:
        """Unique in the run without asking the coordinator: far above those of workers, and increasing."""
        self._newest = max(self._newest + 1, time.time_ns() // 1000)
        return self._newest

    def bury(self, server: WorkerProcess) -> None:
        """Record an unexpected death; `fill` replaces the server, unless that would be useless."""
        if self._ending or server.end is None:
            return
        if server is self.spare.process:
            self.spare.note_death(time.monotonic())
            self._gone.append(server)
            return
        lives = self._lives.setdefault(server.number, [])
        steps = (server.step or 0) - (server.first_step or 0)
        lives.append(ServerLife(time.monotonic() - server.started_at, steps))
        if is_hopeless(server.end, lives):
            self._hopeless = self._hopeless or server

    def failure(self, attempt: int, now: float) -> FailedServer | None:
        """For the coordinator: the server that is not restarted, and why."""
        report = self._hopeless.report(now) if self._hopeless is not None else None
        if report is None or report.end is None:
            return None
        return FailedServer(attempt=attempt, end=report.end, ended_s_ago=report.ended_s_ago)

    # ---- ending ----

    def end(self, by: float) -> None:
        """Ask servers to end, and kill them at the deadline. One that never joined has nothing to finish."""
        if not self._ending:
            self.asked_to_end = True
            for server in self.processes:
                server.dismissed_at, server.may_end = time.monotonic(), True
                if not server.greeted:
                    server.kill()
        self.kill_by(by)

    def kill_by(self, when: float) -> None:
        self._ending = True
        self._kill_at = when if self._kill_at is None else min(when, self._kill_at)

    def tick(self, now: float) -> None:
        if self._kill_at is not None and now >= self._kill_at:
            for server in self.processes:
                if self.asked_to_end and server.greeted and server.dismissed_at is not None:
                    server.hung = server.hung or f"did not end within {now - server.dismissed_at:.1f} s"
            self.kill()
        self.fill()
        self._keep_spare(now)

    def kill(self) -> None:
        self._ending = True
        for server in self.processes:
            server.kill()

    def statuses(self, now: float) -> list[ServerStatus]:
        return [self._status(server, now) for _, server in sorted(self._current.items())]

    def _status(self, server: WorkerProcess, now: float) -> ServerStatus:
        state = "ending" if self._ending else "leaving" if server.may_end else "live" if server.greeted else "starting"
        return ServerStatus(
            server=server.number,
            pid=server.pid,
            status=state if server.alive else server.status,
            phase=server.phase,
            age_s=now - server.heard_at,
            step=server.step,
            deaths=len(self._lives.get(server.number, [])),
        )
