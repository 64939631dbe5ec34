"""The agent: one process per host that starts, watches, fences and restarts that host's workers.

One thread, one loop over sockets, pipes and pidfds. The agent reports how its host stands and makes it stand as the
coordinator orders; it decides nothing about the run. The first host's agent is also the parent of the coordinator, and
starts it again when it dies. Start reading at `run_agent`, then `Agent._obey`.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import zmq
from msgspec.structs import replace

from manyhands.control.agent.admission import Reception
from manyhands.control.agent.coordinator_watch import CoordinatorWatch
from manyhands.control.agent.hang_watch import HangWatch
from manyhands.control.agent.host_events import Chronicle
from manyhands.control.agent.host_workers import Crew
from manyhands.control.agent.preflight import check_command, job_of, resolve
from manyhands.control.agent.resources import Premises
from manyhands.control.agent.shutdown import Departure
from manyhands.control.agent.status_report import Account
from manyhands.control.agent.user_requests import may_start_servers, with_servers
from manyhands.control.agent.wishes import Wishes
from manyhands.control.agent.worker_channel import Desk
from manyhands.control.membership.generations import is_later
from manyhands.control.membership.hang_detection import Limits
from manyhands.control.messages.agent_messages import Job, Orders, Plan
from manyhands.control.messages.launch_request import Display, LaunchRequest
from manyhands.control.messages.worker_messages import Hello, Refusal, StoreReply
from manyhands.control.processes.worker_output import Stream
from manyhands.control.processes.worker_process import Worker
from manyhands.errors import JoinRefused, ManyhandsError
from manyhands.events import LaunchStarted

__all__ = ["run_agent"]

POLL_S = 0.2
SWEEP_POLL_S = 0.01
REPORT_EVERY_S = 1.0
# Until then the script may still name the run directory.
ADOPT_AFTER_S = 10.0
STOPPED_TO_START_AGAIN = 75


def run_agent(request: LaunchRequest, display: Display) -> int:
    """Run this host's part until the run ends; returns the exit code, as docs/cli.md has them.

    Raises a `ManyhandsError` where the run cannot start or this host cannot be part of it; its `exit_code` is the one
    to end with. Signals are handled when called from the main thread. The display is left open. A script that asks for
    parameter servers where none were asked for is started again, with them.
    """
    try:
        return _run_once(request, display)
    except _ServersWanted as wanted:
        request = with_servers(request, wanted.number)
        display.say(f"the script asks for {wanted.number} parameter server{'s'[: wanted.number > 1]}: starting again")
        display.event(LaunchStarted(workers=request.workers, servers=request.servers))
        return _run_once(request, display)


class _ServersWanted(Exception):
    def __init__(self, number: int) -> None:
        self.number = number


def _run_once(request: LaunchRequest, display: Display) -> int:
    job = job_of(request)
    premises = Premises(f"agent-{secrets.token_hex(8)}", request, resolve(request), job, display.say)
    try:
        return Agent(request, premises, job, display).run()
    finally:
        premises.close()


class Agent:
    def __init__(self, request: LaunchRequest, premises: Premises, job: Job | None, display: Display) -> None:
        self._request, self._at, self._job, self._display = request, premises, job, display
        self._host = socket.gethostname()
        self._chronicle = Chronicle(premises.book, display, self._host)
        self._watch = CoordinatorWatch(
            premises,
            join_timeout_s=request.join_timeout_s,
            lost_after_s=request.lost_after_s,
            say=display.say,
            warn=self._chronicle.warn,
        )
        self._term, self._revision, self._generation = 0, 0, ""
        self._crew: Crew | None = None
        self._crew_started = 0.0
        self._wishes = Wishes(request)
        self._departure = Departure(premises, self._wishes, display)
        self._hangs = HangWatch()
        self._changed, self._reported_at = True, 0.0
        self._exit_code: int | None = None
        self._reception = Reception(request, premises.book, owner=premises.coordinator is not None, say=display.say)
        self._desk = Desk(
            premises.context,
            premises.desk_endpoint,
            premises.name,
            send=premises.link.send,
            hello=self._greet,
            event=self._chronicle.publish,
            key=premises.addresses.key,
        )
        self._account = Account(self._host, request, premises, self._wishes, self._desk)

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
            self._watch.revive("died", self._term)
        if at.meeting is not None and at.meeting.waiting_fd in ready:
            at.meeting.serve(self._request.environment)

    def _attend_worker(self, fd: int, worker: Worker) -> None:
        assert self._crew is not None
        changed = self._crew.attend(fd, worker)
        if worker.wants_servers and not worker.greeted and may_start_servers(self._request):
            self._exit_code = STOPPED_TO_START_AGAIN
            self._crew.kill_and_wait()
            self._at.book.leave_provisional()
            raise _ServersWanted(worker.wants_servers)
        if not changed:
            return
        self._changed = True
        self._desk.tell_servers(self._crew, time.monotonic())  # of a death, before anything that takes time
        if self._crew.clear:
            self._at.renew_meeting()
        if worker.failed_at is not None:
            self._reception.adopt_default(self._crew)
            self._chronicle.note_loss(worker)
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
        if (gone := self._departure.exit_code(self._crew, now)) is not None:
            self._exit_code = gone
        self._watch.look(self._term)
        for news in (self._at.tend_backup(), self._at.guard.tend()):
            if news is not None:
                self._chronicle.warn(news)
        self._reception.welcome(self._desk, self._wishes.stop_kind)
        if self._reception.refusal is not None:
            self._exit_code = self._reception.refusal.exit_code

    def _watch_elastic(self, crew: Crew, now: float) -> None:
        self._desk.announce(crew, now)
        self._desk.tell_servers(crew, now)
        job = self._job
        assert job is not None
        self._hangs.look(crew.everyone, Limits(job.heartbeat_s, job.hang_s), now)

    # ---- reporting and obeying ----

    def _report(self, now: float, *, leaving: bool = False) -> None:
        self._changed, self._reported_at = False, now
        report = self._account.report(
            self._crew,
            now,
            generation=self._generation,
            term=self._term,
            has_job=self._job is not None,
            leaving=leaving or self._departure.is_leaving(now),
        )
        self._at.link.send(report)
        if self._crew is not None:
            self._crew.look_at_memory(now)

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
        if orders.stop is not None:
            self._wishes.ask_stop(orders.stop, orders.stop_signal)
            self._departure.stay_for_stop(time.monotonic())
        match orders.do:
            case "wait":
                self._stand_by(orders)
            case "run":
                self._watch.wait_is_over()
                self._run_plan(orders)
            case "stop":
                self._stop_generation(orders.generation, well=orders.well)
            case "end":
                self._end(orders)
        if orders.note and orders.do != "end":
            self._chronicle.warn(orders.note)
        self._apply_stop()

    def _stand_by(self, orders: Orders) -> None:
        if orders.waiting_for:
            self._watch.say_waiting(orders.waiting_for)
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
        self._generation = plan.generation
        self._desk.new_generation(still_spoken_for)
        self._chronicle.begin_generation(plan)

    def _start_crew(self, plan: Plan, job: Job) -> None:
        at = self._at
        self._crew_started, self._changed = time.monotonic(), True
        at.book.host = plan.host
        self._begin_generation(plan)
        self._chronicle.begin_attempt()
        self._reception.new_generation()
        around = at.surroundings(job, self._host, output=self._show_output, started=self._chronicle.note_start)
        self._crew = Crew(plan, around)
        if not self._crew.everyone:
            self._reception.adopt_default(self._crew)  # nobody here will name a directory
        if (folder := at.book.logs(plan.attempt)) is not None:
            self._crew.write_logs_to(folder)

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
        step = max((worker.step or 0 for worker in self._crew.workers), default=0) if self._crew else 0
        self._chronicle.record_end(orders.exit_code, step, orders.note)
        if orders.failure is None and orders.exit_code != 0:
            self._chronicle.say_resume(self._request.resume)
        self._exit_code = orders.exit_code

    # ---- stopping on request ----

    def _act_on_signals(self) -> None:
        for number in self._at.signals.take():
            elastic = self._job is not None and self._job.most_workers > 0
            if (at_once := self._departure.heed(number, self._grace_s(), elastic=elastic)) is not None:
                self._exit_code = at_once
                return
            self._heed_wishes()

    def _heed_wishes(self) -> None:
        self._changed = True
        self._apply_stop()

    def _apply_stop(self) -> None:
        if self._wishes.stop is not None and self._crew is not None and not self._crew.clear:
            kind, number = self._wishes.stop
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
        self._wishes.replica = max(hello.facts.replica, self._wishes.replica)
        self._reception.greet(worker, hello.facts, self._crew, self._desk, self._wishes.stop_kind)
        servers = self._crew.plan.servers
        self._at.keeps_logs |= hello.facts.backup and len(self._at.servers_here(servers)) < servers
        self._changed = True

    def _answer_people(self) -> None:
        for peer, question in self._at.people.receive():
            refusal = self._wishes.hear(question, run=self._at.book.run, run_dir=self._at.book.path)
            if refusal is None and question.what != "status":
                self._heed_wishes()
            self._at.people.send(refusal or self._account.status(self._crew, self._generation), to=peer)

    def _show_output(self, worker: Worker, stream: Stream, data: bytes) -> None:
        if self._crew is not None and self._crew.is_chief(worker):
            self._display.output(0, stream, data)


def _poll(watched: list[Any], timeout_s: float) -> dict[Any, int]:
    poller = zmq.Poller()
    for item in watched:
        if item is not None:
            poller.register(item, zmq.POLLIN)
    return dict(poller.poll(round(timeout_s * 1000)))
