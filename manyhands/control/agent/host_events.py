"""Events of a host that its agent writes to the run's record and shows on the display.

Each event once. Nothing is decided or done here; start reading at `record`.
"""

from __future__ import annotations

import shlex
import time

from manyhands.control.agent.run_record import AgentRecord
from manyhands.control.messages.agent_messages import HostPlan
from manyhands.control.messages.failure import describe, escape
from manyhands.control.messages.launch_request import Display
from manyhands.control.processes.worker_process import WorkerProcess
from manyhands.events import (
    Event,
    GenerationStarted,
    ResourcesUsed,
    RunEnded,
    ServerLost,
    ServerStarted,
    ServerWentOn,
    Warned,
    WorkerLost,
    WorkerStarted,
)

__all__ = ["HostEvents"]


class HostEvents:
    def __init__(self, run_record: AgentRecord, display: Display, host: str) -> None:
        self._run_record, self._display, self._host = run_record, display, host
        self._lost: set[int] = set()
        self._reported_lost = False
        """A WorkerLost since the last generation gave the reason for the next one already."""

    def record(self, event: Event) -> None:
        self._run_record.event(event)
        self._display.event(event)

    def publish(self, event: Event) -> None:
        """An event of a worker or server. The chief records its own; the agent those of servers and other ranks."""
        if isinstance(event, ServerWentOn) or (isinstance(event, ResourcesUsed) and event.rank != 0):
            self.record(event)
        else:
            self._display.event(event)

    def warn(self, text: str) -> None:
        self.record(Warned(text=escape(text)))

    def begin_attempt(self) -> None:
        self._lost.clear()

    def begin_generation(self, plan: HostPlan) -> None:
        if plan.why and not (plan.lost and self._reported_lost):
            self._display.say(plan.why)
        self._reported_lost = False
        self._run_record.note_generation(plan.generation)
        self.record(
            GenerationStarted(
                generation=plan.generation, workers=plan.world_size, hosts=plan.num_hosts, why=escape(plan.why)
            )
        )

    def say_resume(self, resume: str | None) -> None:
        """For a run that ended without a failed worker: the command that resumes it."""
        if resume and self._run_record.path:
            self._display.say(f"resume: {resume.replace('{run_dir}', shlex.quote(self._run_record.path))}")

    def record_end(self, exit_code: int, step: int, reason: str) -> None:
        self.record(RunEnded(exit_code=exit_code, step=step, reason=reason, dropped=self._run_record.dropped))

    def note_start(self, worker: WorkerProcess) -> None:
        identity = worker.identity
        if identity.is_spare:
            return
        if identity.is_server:
            self.record(
                ServerStarted(server=identity.server, incarnation=identity.incarnation, host=self._host, pid=worker.pid)
            )
        elif identity.most_workers:
            self.record(
                WorkerStarted(
                    slot=identity.slot,
                    incarnation=identity.incarnation,
                    host=self._host,
                    pid=worker.pid,
                    joining=identity.joining,
                )
            )

    def note_lost(self, worker: WorkerProcess) -> None:
        end = worker.end if worker.identity.is_server else worker.report(time.monotonic()).end
        if end is None or worker.identity.incarnation in self._lost:
            return
        self._lost.add(worker.identity.incarnation)
        reason, collateral = describe(end), end.kind == "stopped"
        if worker.identity.is_spare:
            if not collateral:
                self.warn(f"the spare server (pid {end.pid}) ended, and another one is started later: {reason}")
            return
        if worker.identity.is_server:
            if not collateral:
                self.record(ServerLost(server=end.rank, host=end.host, pid=end.pid, reason=reason))
            return
        self._reported_lost = True
        self.record(WorkerLost(rank=end.rank, host=end.host, pid=end.pid, reason=reason, collateral=collateral))
