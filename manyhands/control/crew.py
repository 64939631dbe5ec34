"""This host's workers in one generation: started together, watched, stopped, and reported as one.

The crew knows processes and clocks; why it starts or stops, the coordinator's orders say.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from manyhands.comm.segments import HostMemory
from manyhands.control.fence import Guard
from manyhands.control.memory import MemoryWatch
from manyhands.control.messages import Job, MemberReport, Plan
from manyhands.control.output import Stream
from manyhands.control.workers import Worker, torchrun_environment
from manyhands.spec.seat import Seat

__all__ = ["Crew", "Surroundings"]

# After a crash the others get this long to write their own tracebacks.
CRASH_GRACE_S = 0.5


class Surroundings:
    """What every crew of this agent shares."""

    def __init__(
        self,
        *,
        agent: str,
        host: str,
        run: str,
        job: Job,
        data_address: str,
        environment: dict[str, str],
        guard: Guard,
        output: Callable[[int, Stream, bytes], None],
    ) -> None:
        self.agent, self.host, self.run, self.job = agent, host, run, job
        self.data_address, self.environment, self.guard, self.output = data_address, environment, guard, output
        self.memory = MemoryWatch()


class Crew:
    def __init__(self, plan: Plan, around: Surroundings) -> None:
        self.plan = plan
        self._around = around
        self._kill_at: float | None = None
        self._stop_kind: str | None = None
        self._looked_at = 0.0
        self.memory = HostMemory()
        self.workers: list[Worker] = []
        for local_rank in range(len(plan.incarnations)):
            worker = self._start(local_rank)
            around.guard.watch(worker.pid)
            self.workers.append(worker)

    def _start(self, local_rank: int) -> Worker:
        plan, around = self.plan, self._around
        seat = Seat(
            agent=around.agent,
            rank=plan.first_rank + local_rank,
            world_size=plan.world_size,
            local_rank=local_rank,
            local_world_size=len(plan.incarnations),
            host=plan.host,
            num_hosts=plan.num_hosts,
            generation=plan.generation,
            incarnation=plan.incarnations[local_rank],
            attempt=plan.attempt,
            data_address=around.data_address,
            memory_fd=self.memory.fd,
            flags=around.job.flags,
        )
        environment = {
            **around.environment,
            **torchrun_environment(seat, around.run, plan.master, around.job.max_restarts),
            **_threads(around.environment, around.job.threads, seat.local_world_size),
            "GLOO_SOCKET_IFNAME": interface_of(around.data_address),
        }
        return Worker(seat, around.job.command, environment, around.host)

    @property
    def generation(self) -> str:
        return self.plan.generation

    @property
    def clear(self) -> bool:
        return not any(worker.alive for worker in self.workers)

    @property
    def failed(self) -> bool:
        return any(worker.failed_at is not None for worker in self.workers)

    def descriptors(self) -> dict[int, Worker]:
        """What to watch: pipes for what is said, pidfds for who died."""
        watched: dict[int, Worker] = {}
        for worker in self.workers:
            watched.update(dict.fromkeys(worker.pipes, worker))
            if worker.alive:
                watched[worker.pidfd] = worker
        return watched

    def attend(self, fd: int, worker: Worker) -> bool:
        """A descriptor is ready. True when a worker's fate changed, so that the coordinator should hear of it."""

        def forward(stream: Stream, data: bytes) -> None:
            self._around.output(worker.seat.rank, stream, data)

        failed_before = worker.failed_at
        if fd in worker.pipes:
            worker.read(fd, forward)
        elif worker.alive and fd == worker.pidfd:
            worker.reap(forward, self._around.memory.hint)
            self._around.guard.forget(worker.pid)
            self.memory.lose(worker.seat.local_rank)
            return True
        return worker.failed_at != failed_before

    def tick(self, now: float) -> None:
        if self._kill_at is not None and now >= self._kill_at:
            self.kill()

    def look_at_memory(self, now: float) -> None:
        """At most once a second; reports at every change come more often."""
        if now - self._looked_at < 1.0:
            return
        self._looked_at = now
        self._around.memory.look([worker.pid for worker in self.workers if worker.alive])

    def stop_after_crash(self, now: float) -> None:
        self._kill_by(now + CRASH_GRACE_S)

    def ask_to_stop(self, kind: str, number: int, grace_s: float, tell: Callable[[Worker], None]) -> None:
        """Those who speak our protocol are told; the others get the signal itself."""
        if self._stop_kind is not None:
            return
        self._stop_kind = kind
        self._kill_by(time.monotonic() + grace_s)
        for worker in self.workers:
            if worker.peer is not None:
                tell(worker)
            else:
                worker.kill(number or signal.SIGTERM)

    def _kill_by(self, when: float) -> None:
        self._kill_at = when if self._kill_at is None else min(when, self._kill_at)

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()

    def kill_and_wait(self) -> None:
        """At once; for ends that do not wait for anyone."""
        self.kill()
        for worker in self.workers:
            if worker.alive:
                self.attend(worker.pidfd, worker)

    def reports(self, now: float) -> list[MemberReport]:
        return [worker.report(now) for worker in self.workers]

    def write_logs_to(self, folder: Path) -> None:
        for worker in self.workers:
            worker.log.move_to(folder)

    def close(self) -> None:
        for worker in self.workers:
            worker.log.close()
        self.memory.close()


def _threads(inherited: dict[str, str], asked: int | None, workers: int) -> dict[str, str]:
    if asked is None and "OMP_NUM_THREADS" in inherited:
        return {}
    return {"OMP_NUM_THREADS": str(asked or max(1, len(os.sched_getaffinity(0)) // workers))}


def interface_of(address: str) -> str:
    """The interface that holds an address: what Gloo wants to be told instead of the address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    return "lo"
