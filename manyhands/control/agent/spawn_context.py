"""What all processes that an agent starts have in common, whichever attempt they are of."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import psutil

from manyhands.control.messages.agent_messages import Job, Plan
from manyhands.control.processes.fence import Guard
from manyhands.control.processes.oom_hints import MemoryWatch
from manyhands.control.processes.worker_output import Stream
from manyhands.control.processes.worker_process import Worker, torchrun_environment
from manyhands.spec.worker_identity import Seat

__all__ = ["Surroundings"]


class Surroundings:
    """What every crew of this agent shares."""

    def __init__(
        self,
        *,
        agent: str,
        host: str,
        run: str,
        job: Job,
        num_workers: int,
        data_address: str,
        environment: dict[str, str],
        guard: Guard,
        output: Callable[[Worker, Stream, bytes], None],
        started: Callable[[Worker], None],
        servers_here: Callable[[Plan], Sequence[int]] = lambda plan: (),
        server_prefix: str = "",
    ) -> None:
        self.agent, self.host, self.run, self.job, self.num_workers = agent, host, run, job, num_workers
        self.data_address, self.environment, self.guard = data_address, environment, guard
        self.output, self.started = output, started
        self.servers_here, self.server_prefix = servers_here, server_prefix
        self.memory = MemoryWatch()

    def environment_for(self, seat: Seat, plan: Plan) -> dict[str, str]:
        # How many threads a worker has must not depend on when it was started: its sums would differ in their bits.
        sharing = max(1, self.num_workers) if plan.group else seat.local_world_size
        return {
            **self.environment,
            **torchrun_environment(seat, self.run, plan.master, self.job.max_restarts),
            **_threads(self.environment, self.job.threads, sharing),
            "GLOO_SOCKET_IFNAME": interface_of(self.data_address),
        }


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
