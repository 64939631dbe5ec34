"""What an agent holds open: its private directory, its guard, its sockets, and on the first host the coordinator.

Opened in order, closed in reverse; after `close` nothing of it is left, also when opening failed half-way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import zmq

from manyhands.comm.transport import Port, open_port
from manyhands.control.agent.coordinator_link import Link
from manyhands.control.agent.preflight import Addresses, imports_manyhands, is_loopback, versions
from manyhands.control.agent.run_record import Book
from manyhands.control.agent.spawn_context import Surroundings
from manyhands.control.coordinator.process import CoordinatorConfig
from manyhands.control.membership.state import Settings
from manyhands.control.messages.agent_messages import Job
from manyhands.control.messages.launch_request import JoinTicket, LaunchRequest
from manyhands.control.messages.status_messages import Ask
from manyhands.control.processes.coordinator_process import CoordinatorProcess
from manyhands.control.processes.fence import Guard
from manyhands.control.processes.private_directory import private_directory
from manyhands.control.processes.stop_signals import StopSignals
from manyhands.control.processes.torch_store import TorchMeeting
from manyhands.control.processes.worker_output import Stream
from manyhands.control.processes.worker_process import Worker
from manyhands.control.run_directory import run_name
from manyhands.control.security.keys import write_join_file
from manyhands.control.servers.backup_process import BackupProcess
from manyhands.control.servers.server_ports import ServerPorts, tcp_endpoint

__all__ = ["Premises"]


class Premises:
    def __init__(
        self, name: str, request: LaunchRequest, addresses: Addresses, job: Job | None, say: Callable[[str], None]
    ) -> None:
        self.name, self.addresses, self.versions = name, addresses, versions()
        self._request = request
        self.exit_code = 70
        """For the run's record; what the run ends with sets it."""
        self.coordinator: CoordinatorProcess | None = None
        self.meeting: TorchMeeting | None = None
        self.keeps_logs = False
        self.backup: BackupProcess | None = None
        with ExitStack() as opened:
            self._open(request, job, say, opened)
            self._opened = opened.pop_all()

    def _open(self, request: LaunchRequest, job: Job | None, say: Callable[[str], None], opened: ExitStack) -> None:
        self.signals = StopSignals()
        opened.callback(self.signals.close)
        self.directory = private_directory()
        self.guard = Guard(self.directory)
        opened.callback(self.guard.close)
        self.book = Book(
            _run_name(request, self.addresses),
            _command(request),
            f"ipc://{self.directory}/control",
            group_readable=request.group_readable,
        )
        opened.callback(lambda: self.book.close(self.exit_code))
        self.context: zmq.Context[Any] = zmq.Context()
        opened.callback(self.context.destroy, linger=500)
        if self.addresses.join is not None:
            self.link = Link(self.context, tcp_endpoint(*self.addresses.join), self.name, self.addresses.key)
        else:
            assert job is not None
            self._open_first_host(request, job, say, opened)
        opened.callback(self.link.close)
        several = self.addresses.listen is not None or self.addresses.join is not None
        self.server_ports = ServerPorts(self.addresses.data if several else None, request.server_address)
        opened.callback(self.server_ports.close)
        self.people: Port[Ask] = open_port(self.context, zmq.ROUTER, f"ipc://{self.directory}/control", Ask, bind=True)

    def _open_first_host(self, request: LaunchRequest, job: Job, say: Callable[[str], None], opened: ExitStack) -> None:
        if request.run_dir is not None:
            self.book.adopt(request.run_dir, request.overwrite)
        settings = Settings(
            run=self.book.run,
            job=job,
            versions=self.versions,
            hosts_wanted=request.hosts_wanted,
            begin_with_fewer_s=request.begin_with_fewer_s,
            always_restart=request.always_restart,
            resume=request.resume or "",
            gather_wait_s=request.join_timeout_s,
            elastic=request.elastic,
            silent_after_s=3.0 if request.elastic else 5.0,
        )
        config = CoordinatorConfig(
            settings=settings,
            directory=str(self.directory),
            term_floor=self.book.term_floor(),
            listen=self.addresses.listen,
            key=self.addresses.key,
        )
        self.coordinator = CoordinatorProcess(config)
        opened.callback(self.coordinator.close)
        self.link = Link(self.context, f"ipc://{self.directory}/coordinator", self.name)
        # Whoever imports manyhands will greet, however long it prepares.
        self._patience_s = math.inf if imports_manyhands(job.command) else request.store_after_s
        self.meeting = TorchMeeting(self.addresses.data, self._patience_s)
        opened.callback(self._close_meeting)
        self._invite(request, say)

    def _invite(self, request: LaunchRequest, say: Callable[[str], None]) -> None:
        """Say what crosses the network in the clear, and write the join file where hosts do not share a key already."""
        listen, key = self.addresses.listen, self.addresses.key
        if listen is None or key is None:
            return
        if not is_loopback(listen[0]):
            say(f"tensors between hosts travel in the clear, at {listen[0]} (--insecure-data-plane)")
        if request.key is not None or request.master is not None:
            return
        path = (Path(request.join_file) if request.join_file else self.directory / "join.json").absolute()
        address = tcp_endpoint(*listen).removeprefix("tcp://")
        write_join_file(path, JoinTicket(address=address, run=self.book.run, key=key.hex()))
        more = f"waiting for {request.hosts_wanted - 1} more" if request.hosts_wanted > 1 else "more hosts may join"
        say(f"{more}: mh agent --join {path}")

    @property
    def desk_endpoint(self) -> str:
        """Where this host's workers and servers reach their agent."""
        return f"ipc://{self.directory}/agent"

    def surroundings(
        self,
        job: Job,
        host: str,
        *,
        output: Callable[[Worker, Stream, bytes], None],
        started: Callable[[Worker], None],
    ) -> Surroundings:
        """What the processes of a crew find here."""
        return Surroundings(
            agent=self.desk_endpoint,
            host=host,
            run=self.book.run,
            job=job,
            num_workers=self._request.workers,
            data_address=self.addresses.data,
            environment=self._request.environment,
            guard=self.guard,
            output=output,
            started=started,
            servers_here=lambda plan: self.servers_here(plan.servers),
            server_prefix=f"ipc://{self.directory}/server-" if job.servers else "",
        )

    def servers_here(self, wanted: int) -> Sequence[int]:
        """Their numbers: a cluster's task has its own; else the first host has all."""
        if self._request.server is not None:
            return (self._request.server,)
        return range(wanted) if self.coordinator is not None and not self._request.server_tasks else ()

    def servers_offered(self, wanted: int | None) -> dict[int, str]:
        """Where those can be reached; None: as many as the launch asked for."""
        return self.server_ports.endpoints(self.servers_here(wanted or self._request.servers))

    def tend_backup(self) -> str | None:
        """Keep other hosts' logs, if they want that, and the run directory is known here; what there is to say."""
        if not self.keeps_logs:
            return None
        if self.backup is None and self.server_ports.address is not None and self.book.path is not None:
            self.backup = BackupProcess(self.book.path, self.server_ports.address, self.addresses.key)
            self._opened.callback(self.backup.close)
        return self.backup.tend() if self.backup is not None else None

    def renew_meeting(self) -> None:
        """A store for the next generation: what this one left in its own must not be found again."""
        if self.meeting is not None:
            self.meeting.close()
            self.meeting = TorchMeeting(self.addresses.data, self._patience_s)

    def _close_meeting(self) -> None:
        if self.meeting is not None:
            self.meeting.close()

    def close(self) -> None:
        self._opened.close()


def _run_name(request: LaunchRequest, addresses: Addresses) -> str:
    if addresses.join is not None:
        return addresses.run
    if request.run_dir is not None:
        return Path(request.run_dir).absolute().name
    assert request.command is not None
    return run_name(request.command.target)


def _command(request: LaunchRequest) -> list[str]:
    return [request.command.target, *request.command.args] if request.command else []
