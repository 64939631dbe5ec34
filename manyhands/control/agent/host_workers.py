"""This host's workers and servers in one attempt: started, watched, stopped, and reported together.

`HostWorkers` handles processes and clocks; the coordinator's orders decide what starts or stops. In a static run all
workers are started together and an attempt is one generation; in an elastic run `follow` applies each new plan.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from msgspec.structs import replace

from manyhands.comm.host_memory import HostMemory
from manyhands.control.membership.generations import Generations, group_for, is_later
from manyhands.control.messages.agent_messages import HostPlan, JobDescription, MemberReport, PlannedWorker
from manyhands.control.messages.status_messages import MemberStatus
from manyhands.control.messages.worker_messages import MemoryRequest
from manyhands.control.processes.fence import Guard, kill_session
from manyhands.control.processes.oom_hints import MemoryWatch
from manyhands.control.processes.template_process import Template
from manyhands.control.processes.worker_output import Stream
from manyhands.control.processes.worker_process import WorkerProcess, torchrun_environment
from manyhands.control.servers.server_processes import HostServers
from manyhands.spec.worker_identity import WorkerIdentity

__all__ = [
    "HostWorkers",
    "SpawnContext",
    "elastic_identity",
    "server_identity",
    "sharing",
    "static_identity",
    "threads_of",
]


def static_identity(plan: HostPlan, local_rank: int) -> WorkerIdentity:
    return WorkerIdentity(
        agent="",
        rank=plan.first_rank + local_rank,
        world_size=plan.world_size,
        local_rank=local_rank,
        local_world_size=len(plan.incarnations),
        host=plan.host,
        num_hosts=plan.num_hosts,
        generation=plan.generation,
        incarnation=plan.incarnations[local_rank],
        attempt=plan.attempt,
    )


def elastic_identity(plan: HostPlan, planned: PlannedWorker) -> WorkerIdentity:
    group = group_for(plan, planned.incarnation)
    here = sorted(worker.slot for worker in plan.workers)
    joining = planned.joining or group.rank < 0
    return WorkerIdentity(
        agent="",
        rank=planned.slot if joining else group.rank,
        world_size=group.world_size,
        local_rank=here.index(planned.slot) if joining else group.local_rank,
        local_world_size=len(here) if joining else group.local_world_size,
        host=plan.host,
        num_hosts=plan.num_hosts,
        generation="" if joining else plan.generation,
        incarnation=planned.incarnation,
        attempt=plan.attempt,
        slot=planned.slot,
        joining=joining,
    )


def server_identity(plan: HostPlan, number: int, incarnation: int) -> WorkerIdentity:
    return WorkerIdentity(
        agent="",
        rank=-1,
        world_size=plan.world_size,
        local_rank=0,
        local_world_size=max(1, len(plan.workers)),
        host=plan.host,
        num_hosts=plan.num_hosts,
        generation="",
        incarnation=incarnation,
        attempt=plan.attempt,
        role="server",
        server=number,
    )


@dataclass(frozen=True, kw_only=True)
class SpawnContext:
    """What all workers and servers of this agent are started with, in every attempt."""

    run: str
    job: JobDescription
    # This host, and the endpoint of its agent.
    agent: str
    host: str
    num_workers: int
    data_address: str
    environment: dict[str, str]
    server_prefix: str = ""
    servers_here: Callable[[HostPlan], Sequence[int]] = lambda plan: ()
    # What its processes are started from, watched by and reported to.
    template: Callable[[], Template | None] = lambda: None
    guard: Guard
    memory: MemoryWatch = field(default_factory=MemoryWatch)
    output: Callable[[WorkerProcess, Stream, bytes], None]
    started: Callable[[WorkerProcess], None]

    def environment_for(self, identity: WorkerIdentity, plan: HostPlan) -> dict[str, str]:
        return {
            **self.environment,
            **torchrun_environment(identity, self.run, plan.master, self.job.max_restarts),
            **threads_of(self.environment, self.job.threads, sharing(plan, self.num_workers)),
            "GLOO_SOCKET_IFNAME": interface_of(self.data_address),
        }


def sharing(plan: HostPlan, num_workers: int) -> int:
    """How many workers share this host's cores.

    It must not depend on when a worker was started: with other threads its sums would differ in their bits.
    """
    return max(1, num_workers) if plan.group else max(1, len(plan.incarnations))


def threads_of(inherited: dict[str, str], asked: int | None, workers: int) -> dict[str, str]:
    if asked is None and "OMP_NUM_THREADS" in inherited:
        return {}
    return {"OMP_NUM_THREADS": str(asked or max(1, len(os.sched_getaffinity(0)) // workers))}


def interface_of(address: str) -> str:
    """The network interface of an address: Gloo is configured by interface, not by address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    return "lo"


# After a crash the other workers get this long to write their own tracebacks.
CRASH_GRACE_S = 0.5


class HostWorkers:
    def __init__(self, plan: HostPlan, around: SpawnContext) -> None:
        self.plan = plan
        self._around = around
        self._kill_at: float | None = None
        self._stop_kind: str | None = None
        self._looked_at = 0.0
        self._logs: Path | None = None
        self.memory = HostMemory()
        self.groups = Generations()
        self.workers: list[WorkerProcess] = []
        self.servers = HostServers(self._start_server, self._appoint)
        if plan.group:
            self.follow(plan)
        else:
            for local_rank in range(len(plan.incarnations)):
                self._start_worker(static_identity(plan, local_rank))

    def _start_worker(self, identity: WorkerIdentity) -> None:
        self.workers.append(self._start(identity))

    def _start_server(self, number: int, incarnation: int) -> WorkerProcess:
        return self._start(server_identity(self.plan, number, incarnation))

    def _appoint(self, spare: WorkerProcess, number: int) -> None:
        spare.appoint(number, self.plan.servers_at.get(number, ""))
        if self._logs is not None:
            spare.log.move_to(self._logs)
        self._around.started(spare)

    def _start(self, identity: WorkerIdentity) -> WorkerProcess:
        around = self._around
        identity = replace(
            identity,
            agent=around.agent,
            data_address=around.data_address,
            memory_fd=self.memory.fd,
            flags=around.job.flags,
            most_workers=around.job.most_workers if self.plan.group else 0,
            least_workers=around.job.least_workers if self.plan.group else 0,
            num_servers=self.plan.servers,
            servers=self.servers_at,
            listen=self.plan.servers_at.get(identity.server, "") if identity.is_server else "",
        )
        environment = around.environment_for(identity, self.plan)
        worker = WorkerProcess(identity, around.job.command, environment, around.host, around.template())
        around.guard.watch(worker.pid)
        if self._logs is not None:
            worker.log.move_to(self._logs)
        around.started(worker)
        return worker

    @property
    def servers_at(self) -> str:
        """Where processes of this host reach the servers: locally, if it has them all, else by their addresses."""
        if len(self._around.servers_here(self.plan)) >= self.plan.servers:
            return self._around.server_prefix
        return ",".join(endpoint for _, endpoint in sorted(self.plan.servers_at.items()))

    @property
    def everyone(self) -> list[WorkerProcess]:
        """Workers and servers."""
        return [*self.workers, *self.servers.processes]

    @property
    def generation(self) -> str:
        return self.plan.generation

    @property
    def elastic(self) -> bool:
        return bool(self.plan.group)

    @property
    def clear(self) -> bool:
        return all(process.cleared for process in self.everyone)

    @property
    def living(self) -> dict[int, int]:
        """Slot, by incarnation, of each worker of the run not known to be dead; deaths on this host count at once."""
        ended = {worker.identity.incarnation for worker in self.workers if not worker.alive}
        return {incarnation: slot for incarnation, slot in self.plan.living.items() if incarnation not in ended}

    @property
    def sweeping(self) -> bool:
        """Descendants of dead workers are being killed; `tick` continues that."""
        return any(process.sweep is not None for process in self.everyone)

    @property
    def failed(self) -> bool:
        return any(worker.failed_at is not None for worker in self.workers)

    def is_chief(self, worker: WorkerProcess) -> bool:
        """Whether it is the chief of the newest generation."""
        return self.rank_of(worker) == 0

    def rank_of(self, worker: WorkerProcess) -> int:
        """Its rank in the newest generation; -1 if it is not a member."""
        return group_for(self.plan, worker.identity.incarnation).rank if self.elastic else worker.identity.rank

    def member(self, generation: str, incarnation: int) -> WorkerProcess | None:
        """The live worker that may send messages for this generation: a current one, or one that it has not left yet.

        Or the live server, whose messages are for no generation.
        """
        if (server := self.servers.member(incarnation)) is not None:
            return server
        worker = next((worker for worker in self.workers if worker.identity.incarnation == incarnation), None)
        if worker is None or not self.elastic:
            return worker if generation == self.generation else None
        in_none_yet = not generation and worker.identity.joining
        known = in_none_yet or self.groups.local_rank(generation, incarnation) is not None
        return worker if worker.alive and known else None

    # ---- an elastic run's changes ----

    def follow(self, plan: HostPlan) -> None:
        """Apply the plan: start the workers that it adds, kill those that it lacks."""
        self.adopt(plan)
        self.staff()

    def adopt(self, plan: HostPlan) -> None:
        """First, quickly: set the plan, and wake the workers that wait in an older generation that cannot continue."""
        self.plan = plan
        self.servers.want(self._around.servers_here(plan))
        for generation in self.groups.announce(plan):
            self.memory.lose(None, generation)

    def staff(self) -> None:
        """Then start and end processes as planned."""
        self.servers.fill()
        planned = {worker.incarnation for worker in self.plan.workers}
        for worker in list(self.workers):
            incarnation = worker.identity.incarnation
            if incarnation in self.plan.dismissed:
                self._dismiss(worker)
            elif incarnation not in planned:
                worker.kill()
                self._forget(worker)
        self._fill_slots()

    def _dismiss(self, worker: WorkerProcess) -> None:
        """It exits when it receives the announcement. One that was never in a group has nothing to finish."""
        if worker.dismissed_at is None:
            worker.dismissed_at = time.monotonic()
        if not worker.generation:
            worker.kill()

    def _forget(self, worker: WorkerProcess) -> None:
        """Remove a worker that is not planned any more, once it has ended and was reported as ended."""
        if worker.cleared and worker.end_reported:
            worker.log.close()
            self.workers.remove(worker)

    def _fill_slots(self) -> None:
        """Start planned workers that were never started, once the previous process in their slot has ended."""
        if self._stop_kind is not None or self._kill_at is not None:
            return
        there = {worker.identity.incarnation for worker in self.workers}
        taken = {worker.identity.slot for worker in self.workers if not worker.cleared}
        for planned in self.plan.workers:
            if planned.incarnation not in there and planned.slot not in taken:
                self._start_worker(elastic_identity(self.plan, planned))

    def _lose(self, worker: WorkerProcess) -> None:
        """Wake the workers that wait for one that has ended."""
        if not self.elastic:
            self.memory.lose(worker.identity.local_rank, self.generation)
        for generation in self.groups.of(worker.identity.incarnation):
            self.memory.lose(self.groups.local_rank(generation, worker.identity.incarnation), generation)

    def allot(self, asked: MemoryRequest) -> int:
        offset = self.memory.allot(asked.name, asked.num_bytes, asked.ranks, asked.generation)
        if asked.ranks:
            # Workers that died before the region existed have to be marked as lost in it, too.
            living = [worker.identity.incarnation for worker in self.workers if worker.alive]
            for rank in self.groups.gone(asked.generation, living):
                self.memory.lose(rank, asked.generation)
            if is_later(self.groups.last_loss, asked.generation):
                self.memory.lose(None, asked.generation)
        return offset

    def free_left_generations(self) -> None:
        if self.elastic:
            speaks_for = {worker.identity.incarnation: worker.generation for worker in self.workers if worker.alive}
            for generation in self.groups.leave(speaks_for):
                self.memory.free(generation)

    # ---- watching ----

    def descriptors(self) -> dict[int, WorkerProcess]:
        """Descriptors to poll: pipes for output and records, pidfds for deaths."""
        watched: dict[int, WorkerProcess] = {}
        for worker in self.everyone:
            watched.update(dict.fromkeys(worker.pipes, worker))
            if worker.alive:
                watched[worker.pidfd] = worker
        return watched

    def attend(self, fd: int, worker: WorkerProcess) -> bool:
        """Handle a ready descriptor. True if a worker failed or died, which the coordinator should know."""

        def forward(stream: Stream, data: bytes) -> None:
            self._around.output(worker, stream, data)

        failed_before = worker.failed_at
        if fd in worker.pipes:
            worker.read(fd, forward)
        elif worker.alive and fd == worker.pidfd:
            self._lose(worker)  # first of all: other workers wait for it in the middle of a step
            worker.reap(forward, self._around.memory.hint, hurry=self.elastic and self._kill_at is None)
            if worker.identity.is_server:
                self.servers.bury(worker)
            if worker.cleared:
                self._around.guard.forget(worker.pid)
            return True
        return worker.failed_at != failed_before

    def tick(self, now: float) -> bool:
        """Do what is due. True if the last process of a dead worker is gone, which the coordinator should know."""
        if self._kill_at is not None and now >= self._kill_at:
            self.kill()
        if not self.elastic:
            return False
        if self._stop_kind is not None and self._nobody_left:
            self.servers.end(now + self._around.job.grace_s)
        self.servers.tick(now)
        self._end_stragglers(now)
        self.free_left_generations()
        return self._sweep(now)

    @property
    def _nobody_left(self) -> bool:
        """No worker of the run is left; after a stop, planned workers that were never started will not be."""
        here = {planned.incarnation for planned in self.plan.workers} | set(self.plan.dismissed)
        return not self.living.keys() - here and all(worker.cleared for worker in self.workers)

    def _sweep(self, now: float) -> bool:
        swept = [worker for worker in self.everyone if worker.sweep is not None and worker.sweep.go_on(now)]
        for worker in swept:
            worker.sweep = None
            self._around.guard.forget(worker.pid)
        if swept:
            self._fill_slots()
        return bool(swept) and self.clear

    def _end_stragglers(self, now: float) -> None:
        """Kill workers that should have exited by now: dismissed ones, and ones that raised an exception."""
        for worker in self.everyone:
            grace_s = self._around.job.grace_s
            overdue = worker.dismissed_at is not None and now - worker.dismissed_at > grace_s
            if overdue or (worker.failed_at is not None and now - worker.failed_at > CRASH_GRACE_S):
                worker.kill()

    def look_at_memory(self, now: float) -> None:
        """Sample at most once a second; reports are sent more often."""
        if now - self._looked_at < 1.0:
            return
        self._looked_at = now
        self._around.memory.look([process.pid for process in self.everyone if process.alive])

    def stop(self, now: float, *, well: bool) -> None:
        """After a crash, or, if `well`, after the workers were done: servers then get the grace period."""
        self._kill_by(now + CRASH_GRACE_S)
        if well:
            self.servers.end(now + self._around.job.grace_s)
        else:
            self.servers.kill_by(now + CRASH_GRACE_S)

    def ask_to_stop(self, kind: str, number: int, grace_s: float, tell: Callable[[WorkerProcess], None]) -> None:
        """Send a message to workers that use our protocol; the others get the signal itself, if the user's code runs.

        Before that there is nothing to finish, and Python would print a traceback of where the signal interrupted it.
        """
        if self._stop_kind is not None:
            return
        self._stop_kind = kind
        self._kill_by(time.monotonic() + grace_s)
        for worker in self.workers:
            if worker.peer is not None:
                tell(worker)
            else:
                worker.kill((number or signal.SIGTERM) if worker.began else signal.SIGKILL)

    def _kill_by(self, when: float) -> None:
        self._kill_at = when if self._kill_at is None else min(when, self._kill_at)

    def kill_by(self, when: float) -> None:
        """Kill the processes that are left at that time; start no more."""
        self._kill_by(when)
        self.servers.kill_by(when)

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()

    def kill_and_wait(self) -> None:
        """Kill all processes at once, without a grace period."""
        self._kill_by(time.monotonic())
        self.kill()
        self.servers.kill()
        for worker in self.everyone:
            if worker.alive:
                self.attend(worker.pidfd, worker)
            if worker.sweep is not None:
                kill_session(worker.pid)
                worker.sweep = None

    def reports(self, now: float) -> dict[int, MemberReport]:
        return {worker.identity.incarnation: worker.report(now) for worker in self.workers}

    def statuses(self, now: float) -> list[MemberStatus]:
        """The same for `mh status`, by rank and then by slot."""
        found = [self._status(worker, now) for worker in self.workers]
        return sorted(found, key=lambda one: (one.rank < 0, one.rank, one.slot or 0))

    def _status(self, worker: WorkerProcess, now: float) -> MemberStatus:
        status = MemberStatus(
            rank=self.rank_of(worker),
            pid=worker.pid,
            status=worker.status,
            step=worker.step,
            phase=worker.phase,
            age_s=now - worker.moved_at,
        )
        if not self.elastic:
            return status
        return replace(
            status,
            status=_standing(worker) if worker.alive else worker.status,
            slot=worker.number,
            generation=worker.generation,
            call=worker.call,
        )

    def write_logs_to(self, folder: Path) -> None:
        self._logs = folder
        for process in self.everyone:
            process.log.move_to(folder)

    def close(self) -> None:
        for process in self.everyone:
            process.log.close()
        self.memory.close()


def _standing(worker: WorkerProcess) -> str:
    if worker.dismissed_at is not None:
        return "leaving"
    return "live" if worker.generation else "joining" if worker.offers else "starting"
