"""How a host stands, as its agent tells it: to the coordinator in reports, to people in answers."""

from __future__ import annotations

import time

from manyhands.control.agent.host_workers import Crew
from manyhands.control.agent.resources import Premises
from manyhands.control.agent.wishes import Wishes
from manyhands.control.agent.worker_channel import Desk
from manyhands.control.messages.agent_messages import HostReport
from manyhands.control.messages.launch_request import LaunchRequest
from manyhands.control.messages.status_messages import Status

__all__ = ["Account"]


class Account:
    def __init__(self, host: str, request: LaunchRequest, premises: Premises, wishes: Wishes, desk: Desk) -> None:
        self._host, self._request, self._at, self._wishes, self._desk = host, request, premises, wishes, desk

    def report(
        self, crew: Crew | None, now: float, *, generation: str, term: int, has_job: bool, leaving: bool
    ) -> HostReport:
        at, book = self._at, self._at.book
        stop, stop_signal = self._wishes.stop or (None, 0)
        return HostReport(
            run=book.run,
            agent=at.name,
            host=self._host,
            slots=self._request.workers,
            workers_wanted=self._wishes.workers,
            replica=self._wishes.replica,
            servers_wanted=self._wishes.servers,
            servers=at.servers_offered(self._wishes.servers),
            term=term,
            versions=at.versions,
            data_address=at.addresses.data,
            host_rank=self._request.host_rank,
            local=at.coordinator is not None,
            master=at.meeting.master if at.meeting else None,
            generation=generation or None,
            members=crew.reports(now) if crew else [],
            clear=crew is None or crew.clear,
            stop=stop,
            stop_signal=stop_signal,
            run_dir=book.path,
            log_base=book.log_base,
            committed=self._desk.committed,
            has_job=has_job,
            leaving=leaving,
            failed_server=crew.servers.failure(crew.plan.attempt, now) if crew else None,
            backup=at.backup.endpoint if at.backup else "",
        )

    def status(self, crew: Crew | None, generation: str) -> Status:
        coordinator, now = self._at.coordinator, time.monotonic()
        return Status(
            elastic=self._request.elastic,
            workers_wanted=self._wishes.workers,
            servers_wanted=self._wishes.servers,
            run_call=self._desk.run_call,
            run=self._at.book.run,
            run_dir=self._at.book.path,
            generation=generation or None,
            attempt=crew.plan.attempt if crew else 0,
            hosts=crew.plan.num_hosts if crew else 0,
            host=self._host,
            stop=self._wishes.stop_kind,
            coordinator_pid=coordinator.pid if coordinator else 0,
            members=crew.statuses(now) if crew else [],
            servers=crew.servers.statuses(now) if crew else [],
            spare=crew.servers.spare.status(now) if crew else None,
            committed=self._desk.committed,
        )
