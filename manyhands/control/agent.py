"""The agent: one process per host that starts, watches, fences and restarts that host's workers.

One thread, one loop over sockets, pipes and pidfds. The agent reports how its host stands and makes it stand as the
coordinator orders; it decides nothing about the run. The first host's agent is also the parent of the coordinator, and
starts it again when it dies. Start reading at `run_agent`, then `Agent._obey`.
"""

from __future__ import annotations

import secrets
import shlex
import signal
import socket
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import zmq
from msgspec.structs import replace

from manyhands.control.crew import Crew
from manyhands.control.desk import Desk
from manyhands.control.failure import describe, escape
from manyhands.control.groups import is_later
from manyhands.control.hang import Limits
from manyhands.control.hang_watch import HangWatch
from manyhands.control.launch_request import Display, LaunchRequest
from manyhands.control.messages import Hello, HostReport, Job, Orders, Plan, Refusal, StoreReply
from manyhands.control.output import Stream
from manyhands.control.preflight import check_command, resolve
from manyhands.control.premises import Premises
from manyhands.control.questions import Status
from manyhands.control.reception import Reception
from manyhands.control.scaling import why_not_scale
from manyhands.control.surroundings import Surroundings
from manyhands.control.workers import Worker
from manyhands.errors import GaveUp, JoinRefused, ManyhandsError
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

__all__ = ["run_agent"]

POLL_S = 0.2
SWEEP_POLL_S = 0.01
REPORT_EVERY_S = 1.0
# Until then the script may still name the run directory.
ADOPT_AFTER_S = 10.0
HUNG_COORDINATOR_S = 10.0
# Whoever waits for longer than this is told what for.
WAIT_IN_SILENCE_S = 3.0


def run_agent(request: LaunchRequest, display: Display) -> int:
    """Run this host's part until the run ends; returns the exit code of DESIGN.md section 4.

    Raises a `ManyhandsError` where the run cannot start or this host cannot be part of it; its `exit_code` is the one
    to end with. Signals are handled when called from the main thread. The display is left open.
    """
    job = _job(request)
    premises = Premises(f"agent-{secrets.token_hex(8)}", request, resolve(request), job, display.say)
    try:
        return Agent(request, premises, job, display).run()
    finally:
        premises.close()


def _job(request: LaunchRequest) -> Job | None:
    if request.command is None:
        return None
    return Job(
        command=check_command(request.command),
        flags=request.flags,
        grace_s=request.grace_s,
        max_restarts=request.max_restarts,
        threads=request.threads,
        most_workers=request.elastic[1] if request.elastic else 0,
        least_workers=request.elastic[0] if request.elastic else 0,
        heartbeat_s=request.heartbeat_s,
        hang_s=request.hang_s,
        servers=request.servers,
    )


class Agent:
    def __init__(self, request: LaunchRequest, premises: Premises, job: Job | None, display: Display) -> None:
        self._request, self._at, self._job, self._display = request, premises, job, display
        self._host = socket.gethostname()
        self._term, self._revision, self._generation = 0, 0, ""
        self._term_before = 0
        """The last one that was heard before the coordinator was started again."""
        self._crew: Crew | None = None
        self._crew_started = 0.0
        self._lost: set[int] = set()
        self._told_of_loss = False
        """Since the last generation: what would be said of the next one stands in a WorkerLost already."""
        self._stop: tuple[str, int] | None = None
        self._workers_wanted: int | None = None
        self._servers_wanted: int | None = None
        self._leaving_by: float | None = None
        """When this host, having been told to go, kills what has not gone by itself."""
        self._signalled = False
        self._hangs = HangWatch()
        self._changed, self._reported_at = True, 0.0
        self._waiting_since, self._said_waiting = time.monotonic(), ""
        self._exit_code: int | None = None
        self._reception = Reception(request, premises.book, owner=premises.coordinator is not None, say=display.say)
        self._desk = Desk(
            premises.context,
            f"ipc://{premises.directory}/agent",
            premises.name,
            send=premises.link.send,
            hello=self._greet,
            event=self._publish,
            key=premises.addresses.key,
        )

    # ---- the loop ----

    def run(self) -> int:
        try:
            while self._exit_code is None:
                self._wait()
                self._act_on_signals()
                self._tick(time.monotonic())
            if self._reception.refusal is not None:
                raise self._reception.refusal
        except ManyhandsError as error:
            self._exit_code = error.exit_code
            raise
        finally:
            self._at.exit_code = 70 if self._exit_code is None else self._exit_code
            if self._crew is not None:
                self._crew.kill_and_wait()
                self._crew.close()
            # The last word: nothing of the generation lives here. It spares the others the wait for a silent host.
            self._report(time.monotonic(), leaving=True)
            self._desk.close()
        return self._exit_code

    def _wait(self) -> None:
        """Wait for something to happen, and attend to it.

        Messages before pipes before deaths: what workers said before they died explains their death.
        """
        at, crew_fds = self._at, self._crew.descriptors() if self._crew else {}
        ready = _poll(
            [
                at.link.port.socket,
                self._desk.port.socket,
                at.people.socket,
                at.signals.fd,
                *crew_fds,
                at.coordinator.pidfd if at.coordinator else None,
                at.meeting.waiting_fd if at.meeting else None,
            ],
            SWEEP_POLL_S if self._crew and self._crew.sweeping else POLL_S,
        )
        self._changed |= self._desk.attend(self._crew)
        for fd in sorted((fd for fd in crew_fds if fd in ready), key=lambda fd: fd == crew_fds[fd].pidfd):
            self._attend_worker(fd, crew_fds[fd])
        self._take_orders()
        self._answer_people()
        if at.coordinator is not None and at.coordinator.pidfd in ready:
            self._revive_coordinator("died")
        if at.meeting is not None and at.meeting.waiting_fd in ready:
            at.meeting.serve(self._request.environment)

    def _attend_worker(self, fd: int, worker: Worker) -> None:
        assert self._crew is not None
        if not self._crew.attend(fd, worker):
            return
        self._changed = True
        self._desk.tell_servers(self._crew, time.monotonic())  # of a death, before anything that takes time
        if self._crew.clear:
            self._at.renew_meeting()
        if worker.failed_at is not None:
            self._reception.adopt_default(self._crew)
            self._note_loss(worker)
        elif not worker.alive and self._crew.is_chief(worker):
            self._keep_result(worker)

    def _keep_result(self, chief: Worker) -> None:
        if chief.returned is not None and self._request.result_file:
            Path(self._request.result_file).write_text(chief.returned.value)

    def _tick(self, now: float) -> None:
        if self._changed:
            self._report(now)  # before anything that takes time: others may wait for the news of a death
        if self._crew is not None:
            if self._crew.tick(now):
                self._changed = True
                self._at.renew_meeting()
            if self._crew.elastic:
                self._watch_elastic(self._crew, now)
            if self._at.meeting is not None:
                self._at.meeting.look(self._crew.workers, now - self._crew_started)
            if self._at.book.directory is None and now - self._crew_started > ADOPT_AFTER_S:
                self._reception.adopt_default(self._crew)
        if self._changed or now - self._reported_at >= REPORT_EVERY_S:
            self._report(now)
        if self._leaving_by is not None:
            self._leave(self._leaving_by, now)
        self._watch_coordinator()
        if (news := self._at.tend_backup()) is not None:
            self._warn(news)
        self._reception.welcome(self._desk, self._stop[0] if self._stop else None)
        if self._reception.refusal is not None:
            self._exit_code = self._reception.refusal.exit_code

    def _watch_elastic(self, crew: Crew, now: float) -> None:
        self._desk.announce(crew, now)
        self._desk.tell_servers(crew, now)
        job = self._job
        assert job is not None
        self._hangs.look(crew.everyone, Limits(job.heartbeat_s, job.hang_s), now)

    def _watch_coordinator(self) -> None:
        link, coordinator = self._at.link, self._at.coordinator
        if coordinator is not None:
            coordinator.read_stderr()
            if link.silent_s > HUNG_COORDINATOR_S:
                self._revive_coordinator("hung")
            return
        link.check_joining(self._request.join_timeout_s)
        if not link.ever_heard:
            self._say_waiting(f"no run answers at {link.endpoint}; trying for {self._request.join_timeout_s:g} s")
        limit = self._request.lost_after_s
        if link.ever_heard and link.silent_s > limit:
            raise GaveUp(f"The run's first host has been silent for {limit:g} s; its run is over here.")

    def _say_waiting(self, what: str) -> None:
        """Once for each thing waited for, and only if that takes long enough to make somebody wonder."""
        if what != self._said_waiting and time.monotonic() - self._waiting_since > WAIT_IN_SILENCE_S:
            self._said_waiting = what
            self._display.say(f"waiting: {what}")

    def _revive_coordinator(self, what: str) -> None:
        assert self._at.coordinator is not None
        self._warn(f"the coordinator (pid {self._at.coordinator.pid}) {what}; starting it again, training goes on")
        self._at.coordinator.restart(worked=self._term > self._term_before)
        self._term_before = self._term
        self._at.link.heard_at = time.monotonic()

    # ---- reporting and obeying ----

    def _report(self, now: float, *, leaving: bool = False) -> None:
        self._changed, self._reported_at = False, now
        at, crew, book = self._at, self._crew, self._at.book
        stop, stop_signal = self._stop or (None, 0)
        at.link.send(
            HostReport(
                run=book.run,
                agent=at.name,
                host=self._host,
                slots=self._request.workers,
                workers_wanted=self._workers_wanted,
                servers_wanted=self._servers_wanted,
                servers=self._servers_offered(),
                term=self._term,
                versions=at.versions,
                data_address=at.addresses.data,
                host_rank=self._request.host_rank,
                local=at.coordinator is not None,
                master=at.meeting.master if at.meeting else None,
                generation=self._generation or None,
                members=crew.reports(now) if crew else [],
                clear=crew is None or crew.clear,
                stop=stop,
                stop_signal=stop_signal,
                run_dir=book.path,
                log_base=book.log_base,
                committed=self._desk.committed,
                has_job=self._job is not None,
                leaving=leaving or self._leaving_by is not None,
                failed_server=crew.servers.failure(crew.plan.attempt, now) if crew else None,
                backup=at.backup.endpoint if at.backup else "",
            )
        )
        if crew is not None:
            crew.look_at_memory(now)

    def _take_orders(self) -> None:
        for message in self._at.link.receive():
            match message:
                case Orders():
                    self._obey(message)
                case StoreReply():
                    self._desk.answer(message)
                case Refusal() if self._crew is None:
                    raise JoinRefused(message.what, fix=message.fix)

    def _obey(self, orders: Orders) -> None:
        """Make this host stand as ordered. Orders of an older term are from a coordinator that has been replaced."""
        if (orders.term, orders.revision) < (self._term, self._revision) or self._exit_code is not None:
            return
        if orders.term > self._term:
            self._meet_coordinator(orders)
        self._revision = orders.revision
        if self._job is None and orders.job is not None:
            self._job = replace(orders.job, command=check_command(orders.job.command))
        if orders.run_dir is not None:
            self._reception.visit(orders.run_dir, orders.log_base, self._crew)
        if orders.stop is not None and self._stop is None:
            self._stop = (orders.stop, orders.stop_signal)
        match orders.do:
            case "wait":
                self._stand_by(orders)
            case "run":
                self._waiting_since, self._said_waiting = time.monotonic(), ""
                self._run_plan(orders)
            case "stop":
                self._stop_generation(orders.generation, well=orders.well)
            case "end":
                self._end(orders)
        if orders.note and orders.do != "end":
            self._warn(orders.note)
        self._apply_stop()

    def _stand_by(self, orders: Orders) -> None:
        if orders.waiting_for:
            self._say_waiting(orders.waiting_for)
        if self._crew is not None and orders.generation and is_later(orders.generation, self._generation):
            self._end_stale(self._crew)

    def _meet_coordinator(self, orders: Orders) -> None:
        """A new term: tell the new coordinator what the old one knew of this host."""
        first, self._term = self._term == 0, orders.term
        self._at.book.run = orders.run
        if not first and self._generation:
            self._report(time.monotonic())
            self._desk.resend()

    def _run_plan(self, orders: Orders) -> None:
        plan, crew = orders.plan, self._crew
        assert plan is not None
        self._desk.elsewhere, self._desk.run_call = orders.positions, orders.run_call
        if plan.group and crew is not None and plan.attempt == crew.plan.attempt:
            self._follow(plan, crew)
        elif self._job is not None and is_later(plan.generation, self._generation):
            if crew is not None:
                if not crew.clear:
                    self._end_stale(crew)
                    return
                crew.close()
            self._start_crew(plan, self._job)

    def _follow(self, plan: Plan, crew: Crew) -> None:
        """An elastic run goes on: with another generation, or with other workers beside it."""
        if is_later(self._generation, plan.generation):
            return
        crew.adopt(plan)
        self._desk.announce(crew, time.monotonic())  # before anything that takes time: workers wait for it
        self._desk.tell_servers(crew, time.monotonic())
        if plan.generation != self._generation:
            self._changed = True
            self._begin_generation(plan, {worker.generation for worker in crew.workers if worker.alive})
        crew.staff()

    def _end_stale(self, crew: Crew) -> None:
        """An elastic run has gone on without this host, which was away: what still runs here is nobody's any more."""
        if crew.elastic:
            crew.kill_by(time.monotonic())

    def _begin_generation(self, plan: Plan, still_spoken_for: Collection[str] = ()) -> None:
        if plan.why and not (plan.lost and self._told_of_loss):
            self._display.say(plan.why)
        self._told_of_loss = False
        self._generation = plan.generation
        self._at.book.note_generation(plan.generation)
        self._desk.new_generation(still_spoken_for)
        self._record(
            GenerationStarted(
                generation=plan.generation, workers=plan.world_size, hosts=plan.num_hosts, why=escape(plan.why)
            )
        )

    def _start_crew(self, plan: Plan, job: Job) -> None:
        at = self._at
        self._crew_started, self._changed = time.monotonic(), True
        at.book.host = plan.host
        self._begin_generation(plan)
        self._lost.clear()
        self._reception.new_generation()
        around = Surroundings(
            agent=f"ipc://{at.directory}/agent",
            host=self._host,
            run=at.book.run,
            job=job,
            num_workers=self._request.workers,
            data_address=at.addresses.data,
            environment=self._request.environment,
            guard=at.guard,
            output=self._show_output,
            started=self._note_start,
            servers_here=lambda plan: self._servers_here(plan.servers),
            server_prefix=f"ipc://{at.directory}/server-" if job.servers else "",
        )
        self._crew = Crew(plan, around)
        if not self._crew.everyone:
            self._reception.adopt_default(self._crew)  # nobody here will name a directory
        if (folder := at.book.logs(plan.attempt)) is not None:
            self._crew.write_logs_to(folder)

    def _servers_here(self, wanted: int) -> Sequence[int]:
        """Their numbers: a cluster's task has its own; else the first host has all."""
        request = self._request
        if request.server is not None:
            return (request.server,)
        return range(wanted) if self._at.coordinator is not None and not request.server_tasks else ()

    def _servers_offered(self) -> dict[int, str]:
        numbers = self._servers_here(self._servers_wanted or self._request.servers)
        return self._at.server_ports.endpoints(numbers)

    def _stop_generation(self, generation: str | None, *, well: bool) -> None:
        if generation is None:
            return
        crew = self._crew
        if is_later(generation, self._generation):
            # Ordered to stop what was never started here: now it never will be.
            self._generation, self._changed = generation, True
            if crew is not None and crew.elastic:
                crew.stop(time.monotonic(), well=well)
        elif generation == self._generation and crew is not None:
            crew.stop(time.monotonic(), well=well)

    def _end(self, orders: Orders) -> None:
        assert orders.exit_code is not None
        if self._crew is not None:
            self._crew.kill_and_wait()
        self._reception.adopt_default(self._crew)
        if orders.failure is not None:
            self._display.failure(orders.failure)
        elif orders.exit_code != 0:
            self._display.say(escape(f"run {self._at.book.run} ended: {orders.note}"))
            if self._request.resume and self._at.book.path:
                again = self._request.resume.replace("{run_dir}", shlex.quote(self._at.book.path))
                self._display.say(f"resume: {again}")
        step = max((worker.step or 0 for worker in self._crew.workers), default=0) if self._crew else 0
        dropped = self._at.book.dropped
        self._record(RunEnded(exit_code=orders.exit_code, step=step, reason=orders.note, dropped=dropped))
        self._exit_code = orders.exit_code

    # ---- stopping on request ----

    def _act_on_signals(self) -> None:
        """The first asks for a checkpoint; another one ends everything at once."""
        for number in self._at.signals.take():
            nobody_to_ask = self._at.coordinator is None and not self._at.link.ever_heard
            if self._signalled or nobody_to_ask:
                self._exit_code = 130 if number == signal.SIGINT else 143
                return
            self._signalled = True
            name = signal.Signals(number).name
            if self._at.coordinator is None and self._job is not None and self._job.most_workers:
                self._go(name)
                continue
            self._display.say(f"{name}: workers have {self._grace_s():g} s to commit a checkpoint; again: end at once")
            self._ask_stop("preempt", number)

    def _go(self, name: str) -> None:
        """A host that had joined an elastic run leaves it; the others go on."""
        self._display.say(f"{name}: this host's workers have {self._grace_s():g} s to leave; again: end at once")
        self._leaving_by, self._changed = time.monotonic() + self._grace_s(), True

    def _leave(self, by: float, now: float) -> None:
        if self._crew is None or self._crew.clear:
            self._exit_code = 0 if now < by else 143
        elif now >= by:
            self._crew.kill_by(by)

    def _ask_stop(self, kind: str, number: int) -> None:
        self._stop = self._stop or (kind, number)
        self._changed = True
        self._apply_stop()

    def _apply_stop(self) -> None:
        if self._stop is not None and self._crew is not None and not self._crew.clear:
            kind, number = self._stop
            self._crew.ask_to_stop(kind, number, self._grace_s(), lambda worker: self._desk.tell_stop(worker, kind))

    def _grace_s(self) -> float:
        return self._job.grace_s if self._job else self._request.grace_s

    # ---- workers and people ----

    def _greet(self, worker: Worker, hello: Hello) -> None:
        assert self._crew is not None
        if self._crew.elastic:
            self._desk.announce(self._crew, time.monotonic())  # ahead of the welcome: whoever is in knows its group
            self._desk.tell_servers(self._crew, time.monotonic())
        self._crew.servers.spare.is_wanted |= hello.facts.spare
        self._reception.greet(worker, hello.facts, self._crew, self._desk, self._stop[0] if self._stop else None)
        servers = self._crew.plan.servers
        self._at.keeps_logs |= hello.facts.backup and len(self._servers_here(servers)) < servers
        self._changed = True

    def _answer_people(self) -> None:
        for peer, question in self._at.people.receive():
            refusal = None
            match question.what:
                case "stop":
                    self._ask_stop("stop", signal.SIGTERM)
                case "scale":
                    refusal = self._ask_scale(question.workers, question.servers)
            self._at.people.send(refusal or self._status(), to=peer)

    def _ask_scale(self, workers: int | None, servers: int | None) -> Refusal | None:
        book = self._at.book
        refusal = why_not_scale(self._request, workers, servers, run=book.run, run_dir=book.path)
        if refusal is None and self._stop is not None:
            refusal = Refusal(error="UsageError", what=f"{book.run} has been asked to stop.")
        if refusal is not None:
            return refusal
        self._workers_wanted = self._workers_wanted if workers is None else workers
        self._servers_wanted = self._servers_wanted if servers is None else servers
        self._changed = True
        return None

    def _status(self) -> Status:
        crew, coordinator = self._crew, self._at.coordinator
        return Status(
            elastic=self._request.elastic,
            workers_wanted=self._workers_wanted,
            servers_wanted=self._servers_wanted,
            run_call=self._desk.run_call,
            run=self._at.book.run,
            run_dir=self._at.book.path,
            generation=self._generation or None,
            attempt=crew.plan.attempt if crew else 0,
            hosts=crew.plan.num_hosts if crew else 0,
            host=self._host,
            stop=self._stop[0] if self._stop else None,
            coordinator_pid=coordinator.pid if coordinator else 0,
            members=crew.statuses(time.monotonic()) if crew else [],
            servers=crew.servers.statuses(time.monotonic()) if crew else [],
            spare=crew.servers.spare.status(time.monotonic()) if crew else None,
            committed=self._desk.committed,
        )

    # ---- showing ----

    def _show_output(self, worker: Worker, stream: Stream, data: bytes) -> None:
        if self._crew is not None and self._crew.is_chief(worker):
            self._display.output(0, stream, data)

    def _publish(self, event: Event) -> None:
        """A worker's or a server's fact. The chief records its own; those of the others, nobody else would."""
        if isinstance(event, ServerWentOn) or (isinstance(event, ResourcesUsed) and event.rank != 0):
            self._record(event)
        else:
            self._display.event(event)

    def _record(self, event: Event) -> None:
        self._at.book.event(event)
        self._display.event(event)

    def _warn(self, text: str) -> None:
        self._record(Warned(text=escape(text)))

    def _note_start(self, worker: Worker) -> None:
        seat = worker.seat
        if seat.is_spare:
            return
        if seat.is_server:
            self._record(
                ServerStarted(server=seat.server, incarnation=seat.incarnation, host=self._host, pid=worker.pid)
            )
        elif seat.most_workers:
            self._record(
                WorkerStarted(
                    slot=seat.slot,
                    incarnation=seat.incarnation,
                    host=self._host,
                    pid=worker.pid,
                    joining=seat.joining,
                )
            )

    def _note_loss(self, worker: Worker) -> None:
        end = worker.end if worker.seat.is_server else worker.report(time.monotonic()).end
        if end is None or worker.seat.incarnation in self._lost:
            return
        self._lost.add(worker.seat.incarnation)
        reason, collateral = describe(end), end.kind == "stopped"
        if worker.seat.is_spare:
            if not collateral:
                self._warn(f"the spare server (pid {end.pid}) ended, and another one comes later: {reason}")
            return
        if worker.seat.is_server:
            if not collateral:
                self._record(ServerLost(server=end.rank, host=end.host, pid=end.pid, reason=reason))
            return
        self._told_of_loss = True
        self._record(WorkerLost(rank=end.rank, host=end.host, pid=end.pid, reason=reason, collateral=collateral))


def _poll(watched: list[Any], timeout_s: float) -> dict[Any, int]:
    poller = zmq.Poller()
    for item in watched:
        if item is not None:
            poller.register(item, zmq.POLLIN)
    return dict(poller.poll(round(timeout_s * 1000)))
