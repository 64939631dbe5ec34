"""Injects faults: signals and limits on the processes of a live run. Decides only which process a fault hits.

If the scheduled worker or server is missing or has not joined yet, the next one is hit. A run's last healthy worker is
spared until another has joined: without it no worker could continue, and the run would restart from its checkpoint. A
server's state outlives it, so no server is spared. Start reading at `Striker.strike`.
"""

from __future__ import annotations

import heapq
import itertools
import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from manyhands.chaos.extra_agents import RETURN_AFTER_S, ExtraAgents, workers_of
from manyhands.chaos.fault_schedule import ON_SERVERS, ON_TEMPLATE, ON_WORKERS, Fault
from manyhands.control.messages.status_messages import MemberStatus, ServerStatus, Status
from manyhands.control.session.run_client import query
from manyhands.errors import ManyhandsError
from manyhands.launcher.worker_process.hang_on_signal import HANG_SIGNAL

__all__ = ["FaultTimeline", "Strike", "Striker"]

SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "hang": HANG_SIGNAL,
    "kill-server": signal.SIGKILL,
    "stop-server": signal.SIGSTOP,
    "kill-template": signal.SIGKILL,
    "stop-template": signal.SIGSTOP,
}
SLOW_TURN_S = 0.1
RETRY_S = 0.05
# A fault without a target for this long is skipped.
PATIENCE_S = 30.0


class Strike(msgspec.Struct, kw_only=True):
    """A fault as it was injected."""

    fault: Fault
    time_s: float
    """Wall clock, as in events."""
    rank: int | None = None
    slot: int | None = None
    """Slot of a worker; number of a server."""
    pid: int | None = None
    others: list[int] = []
    """Processes that end with it: the workers of a killed agent."""
    step: int | None = None
    """The last step that the victim reported."""
    until_s: float | None = None
    skipped: str = ""
    """Why it was not injected at all."""

    @property
    def who(self) -> str:
        if self.fault.kind in ON_SERVERS:
            return f"server {self.slot}"
        if self.fault.kind not in ON_WORKERS:
            workers = "worker" if len(self.others) == 1 else f"{len(self.others)} workers"
            who = {"disk": "all workers", "agent": f"and its {workers}", **dict.fromkeys(ON_TEMPLATE, "template")}
            return who.get(self.fault.kind, self.fault.kind)
        return f"worker {self.slot}{' (chief)' if self.rank == 0 else ''}"


class FaultTimeline:
    """Actions with their times; one thread, never waits."""

    def __init__(self) -> None:
        self._actions: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def add(self, at: float, act: Callable[[], None]) -> None:
        """`at` is a time of the monotonic clock."""
        heapq.heappush(self._actions, (at, next(self._numbers), act))

    def play(self) -> None:
        """Run the actions that are due."""
        while self._actions and self._actions[0][0] <= time.monotonic():
            heapq.heappop(self._actions)[2]()


class Striker:
    """Injects faults into a run's processes and records them in `strikes`. `say` is called with each."""

    def __init__(
        self, run_dir: Path, timeline: FaultTimeline, agents: ExtraAgents, say: Callable[[Strike], None]
    ) -> None:
        self._run_dir, self._timeline, self._agents, self._say = run_dir, timeline, agents, say
        self.strikes: list[Strike] = []
        self._doomed: set[int] = set()
        """Processes with a permanent fault, whether their agent has noticed it yet or not."""
        self._disk_full_until = 0.0
        self._limits: dict[int, tuple[int, int] | None] = {}
        """Original file-size limits, by process."""

    def strike(self, fault: Fault, *, give_up_at: float | None = None) -> None:
        """Inject the fault now, or as soon as there is a target."""
        give_up_at = give_up_at or time.monotonic() + PATIENCE_S
        status = self._status()
        struck = status is not None and self._at(fault, status)
        if not struck and time.monotonic() < give_up_at:
            self._timeline.add(time.monotonic() + RETRY_S, lambda: self.strike(fault, give_up_at=give_up_at))
        elif not struck:
            target = {**dict.fromkeys(ON_SERVERS, "server"), **dict.fromkeys(ON_TEMPLATE, "template")}.get(fault.kind)
            target = f"{target} to hit" if target else "second healthy worker"
            why = "the run did not answer" if status is None else f"there was no {target}"
            self._note(Strike(fault=fault, time_s=time.time(), skipped=f"{why} for {PATIENCE_S:g} s"))

    def _status(self) -> Status | None:
        with suppress(ManyhandsError, OSError):
            return query(self._run_dir)
        return None

    def _at(self, fault: Fault, status: Status) -> bool:
        match fault.kind:
            case "coordinator":
                return self._coordinator(fault, status)
            case "disk":
                return self._disk(fault, status)
            case "agent":
                return self._agent(fault, status)
            case "kill-server" | "stop-server":
                return self._server(fault, status)
            case "kill-template" | "stop-template":
                return self._template(fault, status)
        return self._worker(fault, status)

    def _worker(self, fault: Fault, status: Status) -> bool:
        members = [one for one in status.members if one.pid not in self._doomed and _is_at_work(one)]
        if len(members) < 2:
            return False
        victim = min(members, key=lambda one: _cyclic_order(fault, one.slot))
        struck = Strike(
            fault=fault, time_s=time.time(), rank=victim.rank, slot=victim.slot, pid=victim.pid, step=victim.step
        )
        if fault.kind == "slow":
            struck.until_s = struck.time_s + fault.lasts_s
            self._pause(victim.pid, time.monotonic() + fault.lasts_s)
        elif _send(victim.pid, SIGNALS[fault.kind]):
            self._doomed.add(victim.pid)
        else:
            return False
        self._note(struck)
        return True

    def _server(self, fault: Fault, status: Status) -> bool:
        servers = [one for one in status.servers if one.pid not in self._doomed and _serves(one)]
        if not servers:
            return False
        victim, now = min(servers, key=lambda one: _cyclic_order(fault, one.server)), time.time()
        if not _send(victim.pid, SIGNALS[fault.kind]):
            return False
        self._doomed.add(victim.pid)
        self._note(Strike(fault=fault, time_s=now, slot=victim.server, pid=victim.pid, step=victim.step))
        return True

    def _pause(self, pid: int, until: float) -> None:
        """Stop and resume the process by turns, half of the time each, unless it gets a permanent fault."""
        if time.monotonic() < until and pid not in self._doomed and _send(pid, signal.SIGSTOP):
            self._timeline.add(time.monotonic() + SLOW_TURN_S, lambda: self._resume(pid, until))

    def _resume(self, pid: int, until: float) -> None:
        if pid not in self._doomed and _send(pid, signal.SIGCONT):
            self._timeline.add(time.monotonic() + SLOW_TURN_S, lambda: self._pause(pid, until))

    def _coordinator(self, fault: Fault, status: Status) -> bool:
        now = time.time()
        if not _send(status.coordinator_pid, signal.SIGKILL):
            return False
        self._note(Strike(fault=fault, time_s=now, pid=status.coordinator_pid))
        return True

    def _template(self, fault: Fault, status: Status) -> bool:
        """The process that workers are forked from. One that is stopped can still be killed, but not stopped again."""
        pid, now = status.template_pid, time.time()
        is_struck = fault.kind == "stop-template" and pid in self._doomed
        if not pid or is_struck or not _send(pid, SIGNALS[fault.kind]):
            return False
        self._doomed.add(pid)
        self._note(Strike(fault=fault, time_s=now, pid=pid))
        return True

    def _agent(self, fault: Fault, status: Status) -> bool:
        """Simulate the loss of a host: an agent and its workers die at once. Another agent starts after a while."""
        others, now = self._agents.pids(), time.time()
        members = [one for one in status.members if one.pid not in self._doomed and _is_at_work(one)]
        if not others or not members:
            return False
        assert fault.slot is not None
        victim = others[fault.slot % len(others)]
        lost = workers_of(victim)
        if not lost:
            return False
        self._agents.strike(victim)
        self._timeline.add(time.monotonic() + RETURN_AFTER_S, self._agents.replace_lost)
        self._note(Strike(fault=fault, time_s=now, pid=victim, others=lost))
        return True

    def _disk(self, fault: Fault, status: Status) -> bool:
        """Every write to a file fails in every worker, as on a full disk, for a while."""
        now = time.time()
        try:
            limits = {one.pid: _forbid_files(one.pid) for one in status.members if one.status == "live"}
        except PermissionError as error:
            self._note(Strike(fault=fault, time_s=now, skipped=f"file sizes cannot be limited here: {error.strerror}"))
            return True
        if not any(limits.values()):
            return False
        for pid, before in limits.items():  # keep the first: the disk may be full already
            self._limits.setdefault(pid, before)
        self._disk_full_until = time.monotonic() + fault.lasts_s
        self._timeline.add(self._disk_full_until, self._free_disk)
        self._note(Strike(fault=fault, time_s=now, until_s=now + fault.lasts_s))
        return True

    def _free_disk(self) -> None:
        if time.monotonic() >= self._disk_full_until:
            for pid, before in self._limits.items():
                if before is not None:
                    with suppress(ProcessLookupError):
                        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
            self._limits.clear()

    def _note(self, struck: Strike) -> None:
        self.strikes.append(struck)
        self._say(struck)


def _is_at_work(member: MemberStatus) -> bool:
    return member.status == "live" and member.rank >= 0 and member.step is not None


def _serves(server: ServerStatus) -> bool:
    return server.status == "live" and server.step is not None


def _cyclic_order(fault: Fault, slot: int | None) -> tuple[bool, int]:
    """Sort key that puts the scheduled number first, then the following ones, cyclically."""
    assert fault.slot is not None
    assert slot is not None
    return slot < fault.slot, slot


def _send(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _forbid_files(pid: int) -> tuple[int, int] | None:
    """The process's previous limits; None if it has ended."""
    try:
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
    except ProcessLookupError:
        return None
    return before
