"""This host's workers in one attempt, and its servers: started, watched, stopped, and reported as one.

The crew knows processes and clocks; why it starts or stops, the coordinator's orders say. In a static run all are
started together and an attempt is one generation; in an elastic one workers come and go as `follow` is told.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from manyhands.comm.host_memory import HostMemory
from manyhands.control.agent.identity_assignment import elastic_seat, server_seat, static_seat
from manyhands.control.agent.spawn_context import Surroundings
from manyhands.control.membership.generations import Groups, group_for, is_later
from manyhands.control.messages.agent_messages import MemberReport, Plan
from manyhands.control.messages.status_messages import MemberStatus
from manyhands.control.messages.worker_messages import MemoryRequest
from manyhands.control.processes.fence import kill_session
from manyhands.control.processes.worker_output import Stream
from manyhands.control.processes.worker_process import Worker
from manyhands.control.servers.server_processes import Servers
from manyhands.spec.worker_identity import Seat

__all__ = ["Crew"]

# After a crash the others get this long to write their own tracebacks.
CRASH_GRACE_S = 0.5


class Crew:
    def __init__(self, plan: Plan, around: Surroundings) -> None:
        self.plan = plan
        self._around = around
        self._kill_at: float | None = None
        self._stop_kind: str | None = None
        self._looked_at = 0.0
        self._logs: Path | None = None
        self.memory = HostMemory()
        self.groups = Groups()
        self.workers: list[Worker] = []
        self.servers = Servers(self._start_server, self._appoint)
        if plan.group:
            self.follow(plan)
        else:
            for local_rank in range(len(plan.incarnations)):
                self._start_worker(static_seat(plan, local_rank))

    def _start_worker(self, seat: Seat) -> None:
        self.workers.append(self._start(seat))

    def _start_server(self, number: int, incarnation: int) -> Worker:
        return self._start(server_seat(self.plan, number, incarnation))

    def _appoint(self, spare: Worker, number: int) -> None:
        spare.appoint(number, self.plan.servers_at.get(number, ""))
        if self._logs is not None:
            spare.log.move_to(self._logs)
        self._around.started(spare)

    def _start(self, seat: Seat) -> Worker:
        around = self._around
        seat = replace(
            seat,
            agent=around.agent,
            data_address=around.data_address,
            memory_fd=self.memory.fd,
            flags=around.job.flags,
            most_workers=around.job.most_workers if self.plan.group else 0,
            least_workers=around.job.least_workers if self.plan.group else 0,
            num_servers=self.plan.servers,
            servers=self.servers_at,
            listen=self.plan.servers_at.get(seat.server, "") if seat.is_server else "",
        )
        worker = Worker(seat, around.job.command, around.environment_for(seat, self.plan), around.host)
        around.guard.watch(worker.pid)
        if self._logs is not None:
            worker.log.move_to(self._logs)
        around.started(worker)
        return worker

    @property
    def servers_at(self) -> str:
        """Where processes of this host reach the servers: here, if it has them all, else by their addresses."""
        if len(self._around.servers_here(self.plan)) >= self.plan.servers:
            return self._around.server_prefix
        return ",".join(endpoint for _, endpoint in sorted(self.plan.servers_at.items()))

    @property
    def everyone(self) -> list[Worker]:
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
        """The slots, by incarnation, of the run's workers that are not known to be dead, and known here first."""
        ended = {worker.seat.incarnation for worker in self.workers if not worker.alive}
        return {incarnation: slot for incarnation, slot in self.plan.living.items() if incarnation not in ended}

    @property
    def sweeping(self) -> bool:
        """What dead workers started is being killed; `tick` goes on with it."""
        return any(process.sweep is not None for process in self.everyone)

    @property
    def failed(self) -> bool:
        return any(worker.failed_at is not None for worker in self.workers)

    def is_chief(self, worker: Worker) -> bool:
        """Of the newest generation."""
        return self.rank_of(worker) == 0

    def rank_of(self, worker: Worker) -> int:
        """In the newest generation; -1 if it is not in it."""
        return group_for(self.plan, worker.seat.incarnation).rank if self.elastic else worker.seat.rank

    def member(self, generation: str, incarnation: int) -> Worker | None:
        """The living worker that may speak so: of this generation, or of one here that it has not left yet.

        Or the living server, which speaks for none.
        """
        if (server := self.servers.member(incarnation)) is not None:
            return server
        worker = next((worker for worker in self.workers if worker.seat.incarnation == incarnation), None)
        if worker is None or not self.elastic:
            return worker if generation == self.generation else None
        in_none_yet = not generation and worker.seat.joining
        known = in_none_yet or self.groups.local_rank(generation, incarnation) is not None
        return worker if worker.alive and known else None

    # ---- an elastic run's changes ----

    def follow(self, plan: Plan) -> None:
        """Stand as the plan has it: whoever it adds is started, whoever it lacks is killed."""
        self.adopt(plan)
        self.staff()

    def adopt(self, plan: Plan) -> None:
        """The first half, which takes no time: the plan holds, and nobody waits in vain in an older generation."""
        self.plan = plan
        self.servers.want(self._around.servers_here(plan))
        for generation in self.groups.announce(plan):
            self.memory.lose(None, generation)

    def staff(self) -> None:
        """The second half: processes."""
        self.servers.fill()
        planned = {worker.incarnation for worker in self.plan.workers}
        for worker in list(self.workers):
            incarnation = worker.seat.incarnation
            if incarnation in self.plan.dismissed:
                self._dismiss(worker)
            elif incarnation not in planned:
                worker.kill()
                self._forget(worker)
        self._fill_slots()

    def _dismiss(self, worker: Worker) -> None:
        """It ends by itself when it hears of it. One that was never in a group has nothing to bring to an end."""
        if worker.dismissed_at is None:
            worker.dismissed_at = time.monotonic()
        if not worker.generation:
            worker.kill()

    def _forget(self, worker: Worker) -> None:
        """One that has ended, was reported so, and is planned no more."""
        if worker.cleared and worker.end_reported:
            worker.log.close()
            self.workers.remove(worker)

    def _fill_slots(self) -> None:
        """Start who is planned and was never started, once the process before in its slot is gone."""
        if self._stop_kind is not None or self._kill_at is not None:
            return
        there = {worker.seat.incarnation for worker in self.workers}
        taken = {worker.seat.slot for worker in self.workers if not worker.cleared}
        for planned in self.plan.workers:
            if planned.incarnation not in there and planned.slot not in taken:
                self._start_worker(elastic_seat(self.plan, planned))

    def _lose(self, worker: Worker) -> None:
        """Wake whoever waits for a worker that has ended."""
        if not self.elastic:
            self.memory.lose(worker.seat.local_rank, self.generation)
        for generation in self.groups.of(worker.seat.incarnation):
            self.memory.lose(self.groups.local_rank(generation, worker.seat.incarnation), generation)

    def allot(self, asked: MemoryRequest) -> int:
        offset = self.memory.allot(asked.name, asked.num_bytes, asked.ranks, asked.generation)
        if asked.ranks:
            # Who died before the plane was there has to be known in it, too.
            living = [worker.seat.incarnation for worker in self.workers if worker.alive]
            for rank in self.groups.gone(asked.generation, living):
                self.memory.lose(rank, asked.generation)
            if is_later(self.groups.last_loss, asked.generation):
                self.memory.lose(None, asked.generation)
        return offset

    def free_left_generations(self) -> None:
        if self.elastic:
            speaks_for = {worker.seat.incarnation: worker.generation for worker in self.workers if worker.alive}
            for generation in self.groups.leave(speaks_for):
                self.memory.free(generation)

    # ---- watching ----

    def descriptors(self) -> dict[int, Worker]:
        """What to watch: pipes for what is said, pidfds for who died."""
        watched: dict[int, Worker] = {}
        for worker in self.everyone:
            watched.update(dict.fromkeys(worker.pipes, worker))
            if worker.alive:
                watched[worker.pidfd] = worker
        return watched

    def attend(self, fd: int, worker: Worker) -> bool:
        """A descriptor is ready. True when a worker's fate changed, so that the coordinator should hear of it."""

        def forward(stream: Stream, data: bytes) -> None:
            self._around.output(worker, stream, data)

        failed_before = worker.failed_at
        if fd in worker.pipes:
            worker.read(fd, forward)
        elif worker.alive and fd == worker.pidfd:
            self._lose(worker)  # first of all: others wait for it in the middle of a step
            worker.reap(forward, self._around.memory.hint, hurry=self.elastic and self._kill_at is None)
            if worker.seat.is_server:
                self.servers.bury(worker)
            if worker.cleared:
                self._around.guard.forget(worker.pid)
            return True
        return worker.failed_at != failed_before

    def tick(self, now: float) -> bool:
        """What is due. True when the last of a dead worker is gone, so that the coordinator should hear of it."""
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
        """Of the run's workers; those planned here that were never started do not come any more after a stop."""
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
        """Those who were to end by themselves: dismissed, or raised and still not gone."""
        for worker in self.everyone:
            grace_s = self._around.job.grace_s
            overdue = worker.dismissed_at is not None and now - worker.dismissed_at > grace_s
            if overdue or (worker.failed_at is not None and now - worker.failed_at > CRASH_GRACE_S):
                worker.kill()

    def look_at_memory(self, now: float) -> None:
        """At most once a second; reports at every change come more often."""
        if now - self._looked_at < 1.0:
            return
        self._looked_at = now
        self._around.memory.look([process.pid for process in self.everyone if process.alive])

    def stop(self, now: float, *, well: bool) -> None:
        """After a crash, or, if `well`, after the workers were done: then servers may take their time."""
        self._kill_by(now + CRASH_GRACE_S)
        if well:
            self.servers.end(now + self._around.job.grace_s)
        else:
            self.servers.kill_by(now + CRASH_GRACE_S)

    def ask_to_stop(self, kind: str, number: int, grace_s: float, tell: Callable[[Worker], None]) -> None:
        """Those who speak our protocol are told; the others get the signal itself, once the user's code runs there.

        Before that there is nothing to bring to an end, and Python would print where the signal found it.
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
        """At that time, whoever is still there is killed, and nobody is started any more."""
        self._kill_by(when)
        self.servers.kill_by(when)

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()

    def kill_and_wait(self) -> None:
        """At once; for ends that do not wait for anyone."""
        self._kill_by(time.monotonic())
        self.kill()
        self.servers.kill()
        for worker in self.everyone:
            if worker.alive:
                self.attend(worker.pidfd, worker)
            if worker.sweep is not None:
                kill_session(worker.pid)
                worker.sweep = None

    def reports(self, now: float) -> list[MemberReport]:
        return [worker.report(now) for worker in self.workers]

    def statuses(self, now: float) -> list[MemberStatus]:
        """The same for people, by rank and then by slot."""
        found = [self._status(worker, now) for worker in self.workers]
        return sorted(found, key=lambda one: (one.rank < 0, one.rank, one.slot or 0))

    def _status(self, worker: Worker, now: float) -> MemberStatus:
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


def _standing(worker: Worker) -> str:
    if worker.dismissed_at is not None:
        return "leaving"
    return "live" if worker.generation else "joining" if worker.offers else "starting"
