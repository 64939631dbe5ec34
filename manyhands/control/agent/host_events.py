"""What an agent tells of its host: to the run's record, and to the person watching.

Facts only, and each once. Whoever decides or acts is elsewhere; start reading at `record`.
"""

from __future__ import annotations

import shlex
import time

from manyhands.control.agent.run_record import Book
from manyhands.control.messages.agent_messages import Plan
from manyhands.control.messages.failure import describe, escape
from manyhands.control.messages.launch_request import Display
from manyhands.control.processes.worker_process import Worker
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

__all__ = ["Chronicle"]


class Chronicle:
    def __init__(self, book: Book, display: Display, host: str) -> None:
        self._book, self._display, self._host = book, display, host
        self._lost: set[int] = set()
        self._told_of_loss = False
        """Since the last generation: what would be said of the next one stands in a WorkerLost already."""

    def record(self, event: Event) -> None:
        self._book.event(event)
        self._display.event(event)

    def publish(self, event: Event) -> None:
        """A worker's or a server's fact. The chief records its own; those of the others, nobody else would."""
        if isinstance(event, ServerWentOn) or (isinstance(event, ResourcesUsed) and event.rank != 0):
            self.record(event)
        else:
            self._display.event(event)

    def warn(self, text: str) -> None:
        self.record(Warned(text=escape(text)))

    def begin_attempt(self) -> None:
        self._lost.clear()

    def begin_generation(self, plan: Plan) -> None:
        if plan.why and not (plan.lost and self._told_of_loss):
            self._display.say(plan.why)
        self._told_of_loss = False
        self._book.note_generation(plan.generation)
        self.record(
            GenerationStarted(
                generation=plan.generation, workers=plan.world_size, hosts=plan.num_hosts, why=escape(plan.why)
            )
        )

    def say_resume(self, resume: str | None) -> None:
        """Of a run that failed in no worker: the command that goes on with it."""
        if resume and self._book.path:
            self._display.say(f"resume: {resume.replace('{run_dir}', shlex.quote(self._book.path))}")

    def record_end(self, exit_code: int, step: int, reason: str) -> None:
        self.record(RunEnded(exit_code=exit_code, step=step, reason=reason, dropped=self._book.dropped))

    def note_start(self, worker: Worker) -> None:
        seat = worker.seat
        if seat.is_spare:
            return
        if seat.is_server:
            self.record(
                ServerStarted(server=seat.server, incarnation=seat.incarnation, host=self._host, pid=worker.pid)
            )
        elif seat.most_workers:
            self.record(
                WorkerStarted(
                    slot=seat.slot,
                    incarnation=seat.incarnation,
                    host=self._host,
                    pid=worker.pid,
                    joining=seat.joining,
                )
            )

    def note_loss(self, worker: Worker) -> None:
        end = worker.end if worker.seat.is_server else worker.report(time.monotonic()).end
        if end is None or worker.seat.incarnation in self._lost:
            return
        self._lost.add(worker.seat.incarnation)
        reason, collateral = describe(end), end.kind == "stopped"
        if worker.seat.is_spare:
            if not collateral:
                self.warn(f"the spare server (pid {end.pid}) ended, and another one comes later: {reason}")
            return
        if worker.seat.is_server:
            if not collateral:
                self.record(ServerLost(server=end.rank, host=end.host, pid=end.pid, reason=reason))
            return
        self._told_of_loss = True
        self.record(WorkerLost(rank=end.rank, host=end.host, pid=end.pid, reason=reason, collateral=collateral))
