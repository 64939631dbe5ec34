"""Builds the host's status report for the coordinator, and the reply to `mh status`."""

from __future__ import annotations

import time

from msgspec.structs import replace

from manyhands.control.agent.host_workers import HostWorkers
from manyhands.control.agent.preflight import program_digest
from manyhands.control.agent.resources import AgentResources
from manyhands.control.agent.user_requests import UserRequests
from manyhands.control.agent.worker_channel import WorkerChannel
from manyhands.control.messages.agent_messages import HostReport, LentHost
from manyhands.control.messages.launch_request import HostSeat, LaunchRequest
from manyhands.control.messages.status_messages import Status

__all__ = ["StatusReport"]


class StatusReport:
    def __init__(
        self,
        host: str,
        request: LaunchRequest,
        resources: AgentResources,
        user_requests: UserRequests,
        channel: WorkerChannel,
    ) -> None:
        self._host, self._request, self._resources = host, request, resources
        self._user_requests, self._channel = user_requests, channel
        seconds_left = request.seat.seconds_left if request.seat else None
        self.deadline = None if seconds_left is None else time.monotonic() + seconds_left
        """When this host's placer ends its agent; None: unknown, or never."""
        self._program = program_digest(request.command) if request.same_program and request.command else ""
        self.refusal = ""
        """Why this host leaves a run that it has joined."""
        self.hosts: list[LentHost] = []
        """As the coordinator last sent them; of the first host only."""

    def report(
        self, host_workers: HostWorkers | None, now: float, *, generation: str, term: int, has_job: bool, leaving: bool
    ) -> HostReport:
        resources, run_record = self._resources, self._resources.run_record
        stop, stop_signal = self._user_requests.stop or (None, 0)
        return HostReport(
            run=run_record.run,
            agent=resources.name,
            host=self._host,
            slots=self._request.workers,
            workers_wanted=self._user_requests.workers,
            replica=self._user_requests.replica,
            servers_wanted=self._user_requests.servers,
            servers=resources.servers_offered(self._user_requests.servers),
            term=term,
            versions=resources.versions,
            data_address=resources.addresses.data,
            host_rank=self._request.host_rank,
            local=resources.coordinator is not None,
            master=resources.torch_store.master if resources.torch_store else None,
            generation=generation or None,
            members=host_workers.reports(now) if host_workers else {},
            clear=host_workers is None or host_workers.clear,
            stop=stop,
            stop_signal=stop_signal,
            run_dir=run_record.path,
            log_base=run_record.log_base,
            committed=self._channel.committed,
            has_job=has_job,
            undecided=not has_job and resources.coordinator is None,
            program=self._program,
            refusal=self.refusal,
            leaving=leaving,
            failed_server=host_workers.servers.failure(host_workers.plan.attempt, now) if host_workers else None,
            backup=resources.backup.endpoint if resources.backup else "",
            seat=self._seat(now),
        )

    def _seat(self, now: float) -> HostSeat | None:
        seat = self._request.seat
        if seat is None or self.deadline is None:
            return seat
        return replace(seat, seconds_left=max(0.0, self.deadline - now))

    def status(self, host_workers: HostWorkers | None, generation: str) -> Status:
        coordinator, template, now = self._resources.coordinator, self._resources.template, time.monotonic()
        return Status(
            elastic=self._request.elastic,
            workers_wanted=self._user_requests.workers,
            servers_wanted=self._user_requests.servers,
            run_call=self._channel.run_call,
            run=self._resources.run_record.run,
            run_dir=self._resources.run_record.path,
            generation=generation or None,
            attempt=host_workers.plan.attempt if host_workers else 0,
            hosts=host_workers.plan.num_hosts if host_workers else 0,
            host=self._host,
            stop=self._user_requests.stop_kind,
            coordinator_pid=coordinator.pid if coordinator else 0,
            template_pid=(template.pid or 0) if template else 0,
            members=host_workers.statuses(now) if host_workers else [],
            servers=host_workers.servers.statuses(now) if host_workers else [],
            spare=host_workers.servers.spare.status(now) if host_workers else None,
            committed=self._channel.committed,
            lent=self.hosts,
        )
