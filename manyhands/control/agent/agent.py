"""The agent: one process per host that starts, watches, fences and restarts that host's workers.

One thread, one loop over sockets, pipes and pidfds. The agent reports the state of its host and brings it into the
state that the coordinator orders; it decides nothing about the run. The first host's agent is also the parent of the
coordinator, and restarts it when it dies. Start reading at `run_agent`, then `Agent._obey`.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import zmq

from manyhands.control.agent.admission import Admission
from manyhands.control.agent.coordinator_watch import CoordinatorWatch
from manyhands.control.agent.hang_watch import HangWatch
from manyhands.control.agent.host_events import HostEvents
from manyhands.control.agent.host_workers import HostWorkers
from manyhands.control.agent.preflight import job_of, joined_job, resolve
from manyhands.control.agent.resources import AgentResources
from manyhands.control.agent.status_report import StatusReport
from manyhands.control.agent.user_requests import Shutdown, UserRequests, may_start_servers, with_servers
from manyhands.control.agent.worker_channel import WorkerChannel
from manyhands.control.membership.generations import is_later
from manyhands.control.membership.hang_detection import HangLimits
from manyhands.control.messages.agent_messages import HostPlan, JobDescription, Orders
from manyhands.control.messages.launch_request import Display, LaunchRequest
from manyhands.control.messages.worker_messages import Refusal, StoreReply, WorkerHello
from manyhands.control.processes.worker_output import Stream
from manyhands.control.processes.worker_process import WorkerProcess
from manyhands.errors import JoinRefused, ManyhandsError
from manyhands.events import CheckpointSaved, Event, LaunchStarted
from manyhands.signals import grace, too_slow_to_commit
from manyhands.spec.host_environment import merged

__all__ = ["run_agent"]

POLL_S = 0.2
SWEEP_POLL_S = 0.01
REPORT_EVERY_S = 1.0
# Until then the agent waits for the script to name the run directory.
ADOPT_AFTER_S = 10.0
STOPPED_FOR_RESTART = 75


def run_agent(request: LaunchRequest, display: Display) -> int:
    """Run this host's part until the run ends; returns the exit code, which docs/cli.md lists.

    Raises a `ManyhandsError` if the run cannot start or this host cannot join it; its `exit_code` is the one to exit
    with. Signals are handled when called from the main thread. The display is left open. If the script asks for
    parameter servers and the launch has none, it is restarted with them.
    """
    try:
        return _run_once(request, display)
    except _ServersWanted as wanted:
        request = with_servers(request, wanted.number)
        display.say(f"the script asks for {wanted.number} parameter server{'s'[: wanted.number > 1]}: restarting it")
        display.event(LaunchStarted(workers=request.workers, servers=request.servers))
        return _run_once(request, display)


class _ServersWanted(Exception):
    def __init__(self, number: int) -> None:
        self.number = number


def _run_once(request: LaunchRequest, display: Display) -> int:
    job = job_of(request)
    resources = AgentResources(f"agent-{secrets.token_hex(8)}", request, resolve(request), job, display.say)
    try:
        return Agent(request, resources, job, display).run()
    finally:
        resources.close()


class Agent:
    def __init__(
        self, request: LaunchRequest, resources: AgentResources, job: JobDescription | None, display: Display
    ) -> None:
        self._request, self._resources, self._job, self._display = request, resources, job, display
        self._host = socket.gethostname()
        self._events = HostEvents(resources.run_record, display, self._host)
        self._watch = CoordinatorWatch(
            resources,
            join_timeout_s=request.join_timeout_s,
            lost_after_s=request.lost_after_s,
            say=display.say,
            warn=self._events.warn,
            hint=request.join_hint,
        )
        self._term, self._revision, self._generation = 0, 0, ""
        self._host_workers: HostWorkers | None = None
        self._workers_started = 0.0
        self._user_requests = UserRequests(request)
        self._shutdown = Shutdown(resources, self._user_requests, display)
        self._hang_watch = HangWatch()
        self._changed, self._reported_at = True, 0.0
        self._exit_code: int | None = None
        self._warned_slow_commit = False
        self._admission = Admission(
            request, resources.run_record, owner=resources.coordinator is not None, say=display.say
        )
        self._channel = WorkerChannel(
            resources.context,
            resources.worker_endpoint,
            resources.name,
            send=resources.link.send,
            hello=self._greet,
            event=self._publish,
            key=resources.addresses.key,
        )
        self._status_report = StatusReport(self._host, request, resources, self._user_requests, self._channel)
        if request.times is not None and request.times.deadline is not None:  # after a restart with servers
            self._status_report.deadline = request.times.deadline

    # ---- the loop ----

    def run(self) -> int:
        try:
            while self._exit_code is None:
                self._wait()
                self._act_on_signals()
                self._tick(time.monotonic())
            if self._admission.refusal is not None:
                raise self._admission.refusal
        except ManyhandsError as error:
            self._exit_code = error.exit_code
            raise
        finally:
            self._resources.exit_code = 70 if self._exit_code is None else self._exit_code
            if self._host_workers is not None:
                self._host_workers.kill_and_wait()
                self._host_workers.close()
            # A last report that no process is left here spares the other hosts the wait for a silent one.
            self._report(time.monotonic(), leaving=True)
            self._channel.close()
            if self._request.times is not None:
                self._request.times.close()
        return self._exit_code

    def _wait(self) -> None:
        """Wait for the next events, and handle them.

        Messages before pipes before deaths: what workers sent before they died explains their death.
        """
        resources, worker_fds = self._resources, self._host_workers.descriptors() if self._host_workers else {}
        template = resources.template
        ready = _poll(
            [
                resources.link.port.socket,
                self._channel.port.socket,
                resources.user_port.socket,
                resources.signals.fd,
                resources.signals.lifeline,
                *worker_fds,
                resources.coordinator.pidfd if resources.coordinator else None,
                resources.torch_store.waiting_fd if resources.torch_store else None,
                *(template.descriptors() if template else ()),
            ],
            SWEEP_POLL_S if self._host_workers and self._host_workers.sweeping else POLL_S,
        )
        self._changed |= self._channel.attend(self._host_workers)
        for fd in sorted((fd for fd in worker_fds if fd in ready), key=lambda fd: fd == worker_fds[fd].pidfd):
            self._serve_worker(fd, worker_fds[fd])
        self._take_orders()
        self._answer_users()
        if resources.coordinator is not None and resources.coordinator.pidfd in ready:
            self._watch.restart_coordinator("died", self._term)
        if resources.torch_store is not None and resources.torch_store.waiting_fd in ready:
            resources.torch_store.serve(self._request.environment)
        if template is not None:
            self._changed |= template.attend()

    def _serve_worker(self, fd: int, worker: WorkerProcess) -> None:
        assert self._host_workers is not None
        changed = self._host_workers.attend(fd, worker)
        if worker.wants_servers and not worker.greeted and may_start_servers(self._request):
            self._exit_code = STOPPED_FOR_RESTART
            self._host_workers.kill_and_wait()
            self._resources.run_record.leave_provisional()
            raise _ServersWanted(worker.wants_servers)
        if not changed:
            return
        self._changed = True
        self._channel.update_servers(self._host_workers, time.monotonic())  # of a death, before anything slow
        if self._host_workers.clear:
            self._resources.renew_torch_store()
        if worker.failed_at is not None:
            self._admission.adopt_default(self._host_workers)
            self._events.note_lost(worker)
        elif not worker.alive and self._host_workers.is_chief(worker):
            self._keep_result(worker)

    def _keep_result(self, chief: WorkerProcess) -> None:
        if chief.returned is not None and self._request.result_file:
            Path(self._request.result_file).write_text(chief.returned.value)

    def _tick(self, now: float) -> None:
        if self._changed:
            self._report(now)  # before anything slow: other hosts may wait for the report of a death
        if self._host_workers is not None:
            if self._host_workers.tick(now):
                self._changed = True
                self._resources.renew_torch_store()
            if self._host_workers.elastic:
                self._watch_elastic(self._host_workers, now)
            if self._resources.torch_store is not None:
                self._resources.torch_store.look(self._host_workers.workers, now - self._workers_started)
            if self._resources.run_record.directory is None and now - self._workers_started > ADOPT_AFTER_S:
                self._admission.adopt_default(self._host_workers)
        if self._changed or now - self._reported_at >= REPORT_EVERY_S:
            self._report(now)
        if (gone := self._shutdown.exit_code(self._host_workers, now)) is not None:
            self._exit_code = gone
        self._look_at_placer(now)
        self._watch.look(self._term)
        for news in self._resources.news():
            self._events.warn(news)
        self._admission.welcome(self._channel, self._user_requests.stop_kind)
        if self._admission.refusal is not None:
            self._exit_code = self._admission.refusal.exit_code

    def _watch_elastic(self, host_workers: HostWorkers, now: float) -> None:
        self._channel.announce(host_workers, now)
        self._channel.update_servers(host_workers, now)
        job = self._job
        assert job is not None
        self._hang_watch.look(host_workers.everyone, HangLimits(job.heartbeat_s, job.hang_s), now)

    def _look_at_placer(self, now: float) -> None:
        times = self._request.times
        if times is None or not times.poll(now):
            return
        self._status_report.deadline, self._changed = times.deadline, True
        if times.kill_after_s is not None and self._resources.coordinator is not None:
            self._display.say(
                f"{placed_by(self._request)} kills {times.kill_after_s:g} s after its notice: workers get "
                f"{self._grace_s():g} s to commit a checkpoint"
            )

    def _publish(self, event: Event) -> None:
        self._events.publish(event)
        times = self._request.times
        if times is None or not isinstance(event, CheckpointSaved) or self._warned_slow_commit:
            return
        if too_slow_to_commit(event.seconds, times.kill_after_s):
            self._warned_slow_commit = True
            self._events.warn(
                f"the checkpoint of step {event.step} took {event.seconds:.0f} s, and {placed_by(self._request)} kills "
                f"{times.kill_after_s:g} s after its notice. try: an earlier notice, such as "
                f"--signal=TERM@{2 * round(event.seconds)}, and --grace {2 * round(event.seconds)}"
            )

    # ---- reporting and obeying ----

    def _report(self, now: float, *, leaving: bool = False) -> None:
        self._changed, self._reported_at = False, now
        report = self._status_report.report(
            self._host_workers,
            now,
            generation=self._generation,
            term=self._term,
            has_job=self._job is not None,
            leaving=leaving or self._shutdown.is_leaving(now),
        )
        self._resources.link.send(report)
        if self._host_workers is not None:
            self._host_workers.look_at_memory(now)

    def _take_orders(self) -> None:
        for message in self._resources.link.receive():
            match message:
                case Orders():
                    self._obey(message)
                case StoreReply():
                    self._channel.answer(message)
                case Refusal() if self._host_workers is None:
                    raise JoinRefused(message.what, fix=message.fix)

    def _obey(self, orders: Orders) -> None:
        """Bring this host into the ordered state. Orders of an older term are from a coordinator that was replaced."""
        if (orders.term, orders.revision) < (self._term, self._revision) or self._exit_code is not None:
            return
        if orders.term > self._term:
            self._begin_term(orders)
        self._revision = orders.revision
        self._status_report.hosts = orders.hosts
        if self._job is None and orders.job is not None:
            self._take_job(orders.job, orders.environment or {})
        if orders.run_dir is not None:
            self._admission.visit(orders.run_dir, orders.log_base, self._host_workers)
        if orders.stop is not None:
            self._user_requests.ask_stop(orders.stop, orders.stop_signal)
            self._shutdown.stay_for_stop(time.monotonic())
        match orders.do:
            case "wait":
                self._wait_as_ordered(orders)
            case "run":
                self._watch.wait_is_over()
                self._run_plan(orders)
            case "stop":
                self._stop_generation(orders.generation, well=orders.well)
            case "end":
                self._end(orders)
        if orders.note and orders.do != "end":
            self._events.warn(orders.note)
        self._apply_stop()

    def _take_job(self, job: JobDescription, environment: dict[str, str]) -> None:
        try:
            self._job = joined_job(job, self._request.own_command, self._host)
        except JoinRefused as error:
            self._status_report.refusal = error.what
            raise
        self._changed = True  # only then does this host get workers
        self._request.environment, note = merged(
            self._request.environment, environment, here=self._host, there=job.host or "the first host"
        )
        if note:
            self._display.say(note)

    def _wait_as_ordered(self, orders: Orders) -> None:
        if orders.waiting_for:
            self._watch.say_waiting(orders.waiting_for)
        if self._host_workers is not None and orders.generation and is_later(orders.generation, self._generation):
            self._end_stale(self._host_workers)

    def _begin_term(self, orders: Orders) -> None:
        """A new term: send the new coordinator what the old one knew of this host."""
        first, self._term = self._term == 0, orders.term
        self._resources.run_record.run = orders.run
        if not first and self._generation:
            self._report(time.monotonic())
            self._channel.resend()

    def _run_plan(self, orders: Orders) -> None:
        plan, host_workers = orders.plan, self._host_workers
        assert plan is not None
        self._channel.elsewhere, self._channel.run_call = orders.positions, orders.run_call
        if plan.group and host_workers is not None and plan.attempt == host_workers.plan.attempt:
            self._follow(plan, host_workers)
        elif self._job is not None and is_later(plan.generation, self._generation):
            if host_workers is not None and not host_workers.clear:
                self._end_stale(host_workers)
                return
            if self._resources.awaits_template(plan, self._job):
                return  # the orders that answer the next report start the workers
            if host_workers is not None:
                host_workers.close()
            self._start_workers(plan, self._job)

    def _follow(self, plan: HostPlan, host_workers: HostWorkers) -> None:
        """An elastic run continues with another generation, or with a change of workers outside of the group."""
        if is_later(self._generation, plan.generation):
            return
        host_workers.adopt(plan)
        self._channel.announce(host_workers, time.monotonic())  # before anything slow: workers wait for it
        self._channel.update_servers(host_workers, time.monotonic())
        if plan.generation != self._generation:
            self._changed = True
            self._begin_generation(plan, {worker.generation for worker in host_workers.workers if worker.alive})
        host_workers.staff()

    def _end_stale(self, host_workers: HostWorkers) -> None:
        """An elastic run continued without this host while it was unreachable: its workers are no longer in the run."""
        if host_workers.elastic:
            host_workers.kill_by(time.monotonic())

    def _begin_generation(self, plan: HostPlan, still_used: Collection[str] = ()) -> None:
        self._generation = plan.generation
        self._channel.new_generation(still_used)
        self._events.begin_generation(plan)

    def _start_workers(self, plan: HostPlan, job: JobDescription) -> None:
        resources = self._resources
        self._workers_started, self._changed = time.monotonic(), True
        resources.run_record.host = plan.host
        if self._request.elastic is None:  # else more hosts may join by that file, such as Slurm's helper jobs
            resources.all_have_joined()
        self._begin_generation(plan)
        self._events.begin_attempt()
        self._admission.new_generation()
        context = resources.spawn_context(job, self._host, output=self._show_output, started=self._events.note_start)
        self._host_workers = HostWorkers(plan, context)
        if not self._host_workers.everyone:
            self._admission.adopt_default(self._host_workers)  # no worker of this host will name a directory
        if (folder := resources.run_record.logs(plan.attempt)) is not None:
            self._host_workers.write_logs_to(folder)

    def _stop_generation(self, generation: str | None, *, well: bool) -> None:
        if generation is None:
            return
        host_workers = self._host_workers
        if is_later(generation, self._generation):
            # Ordered to stop a generation that was not started here: now it never will be.
            self._generation, self._changed = generation, True
            if host_workers is not None and host_workers.elastic:
                host_workers.stop(time.monotonic(), well=well)
        elif generation == self._generation and host_workers is not None:
            host_workers.stop(time.monotonic(), well=well)

    def _end(self, orders: Orders) -> None:
        assert orders.exit_code is not None
        if self._host_workers is not None:
            self._host_workers.kill_and_wait()
        self._admission.adopt_default(self._host_workers)
        if orders.failure is not None:
            self._display.failure(orders.failure)
        step = max((worker.step or 0 for worker in self._host_workers.workers), default=0) if self._host_workers else 0
        self._events.record_end(orders.exit_code, step, orders.note)
        if orders.failure is None and orders.exit_code != 0:
            self._events.say_resume(self._request.resume)
        self._exit_code = orders.exit_code

    # ---- stopping on request ----

    def _act_on_signals(self) -> None:
        for number in self._resources.signals.take():
            elastic = self._job is not None and self._job.most_workers > 0
            if (at_once := self._shutdown.on_signal(number, self._grace_s(), elastic=elastic)) is not None:
                self._exit_code = at_once
                return
            self._apply_user_requests()

    def _apply_user_requests(self) -> None:
        self._changed = True
        self._apply_stop()

    def _apply_stop(self) -> None:
        if self._user_requests.stop is not None and self._host_workers is not None and not self._host_workers.clear:
            kind, number = self._user_requests.stop
            self._host_workers.ask_to_stop(
                kind, number, self._grace_s(), lambda worker: self._channel.send_stop(worker, kind)
            )

    def _grace_s(self) -> float:
        asked, times = self._job.grace_s if self._job else self._request.grace_s, self._request.times
        if times is None:
            return asked
        left_s = None if times.deadline is None else max(0.0, times.deadline - time.monotonic())
        return grace(asked, kill_after_s=times.kill_after_s, left_s=left_s)

    # ---- workers and users ----

    def _greet(self, worker: WorkerProcess, hello: WorkerHello) -> None:
        assert self._host_workers is not None
        if self._host_workers.elastic:
            self._channel.announce(
                self._host_workers, time.monotonic()
            )  # before the welcome: a worker that has joined knows its group
            self._channel.update_servers(self._host_workers, time.monotonic())
        self._host_workers.servers.spare.is_wanted |= hello.facts.spare
        self._user_requests.replica = max(hello.facts.replica, self._user_requests.replica)
        self._admission.greet(worker, hello.facts, self._host_workers, self._channel, self._user_requests.stop_kind)
        servers = self._host_workers.plan.servers
        self._resources.keeps_logs |= hello.facts.backup and len(self._resources.servers_here(servers)) < servers
        self._changed = True

    def _answer_users(self) -> None:
        for peer, user_request in self._resources.user_port.receive():
            refusal = self._user_requests.apply(
                user_request, run=self._resources.run_record.run, run_dir=self._resources.run_record.path
            )
            if refusal is None and user_request.what != "status":
                self._apply_user_requests()
            self._resources.user_port.send(
                refusal or self._status_report.status(self._host_workers, self._generation), to=peer
            )

    def _show_output(self, worker: WorkerProcess, stream: Stream, data: bytes) -> None:
        if self._host_workers is not None and self._host_workers.is_chief(worker):
            self._display.output(0, stream, data)


def placed_by(request: LaunchRequest) -> str:
    seat = request.seat
    return f"{seat.placer} {seat.job}".strip() if seat is not None else "what placed this agent"


def _poll(watched: list[Any], timeout_s: float) -> dict[Any, int]:
    poller = zmq.Poller()
    for item in watched:
        if item is not None:
            poller.register(item, zmq.POLLIN)
    return dict(poller.poll(round(timeout_s * 1000)))
