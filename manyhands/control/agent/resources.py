"""The resources of an agent: its private directory, its guard, its sockets, and on the first host the coordinator.

Opened in order, closed in reverse; after `close`, or if opening fails half-way, none of them is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import zmq

from manyhands.comm.transport import Port, open_port
from manyhands.control.agent.coordinator_link import CoordinatorLink
from manyhands.control.agent.host_workers import SpawnContext, sharing, threads_of
from manyhands.control.agent.preflight import Addresses, imports_manyhands, may_import_torch, versions
from manyhands.control.agent.run_record import AgentRecord
from manyhands.control.coordinator.process import CoordinatorConfig
from manyhands.control.membership.state import MembershipSettings
from manyhands.control.messages.agent_messages import HostPlan, JobDescription
from manyhands.control.messages.launch_request import JoinTicket, LaunchRequest
from manyhands.control.messages.status_messages import StatusRequest
from manyhands.control.processes.child_process import ChildProcess
from manyhands.control.processes.fence import Guard
from manyhands.control.processes.private_directory import private_directory
from manyhands.control.processes.stop_signals import StopSignals
from manyhands.control.processes.template_process import Template
from manyhands.control.processes.torch_store import TorchStoreProcess
from manyhands.control.processes.worker_output import Stream
from manyhands.control.processes.worker_process import WorkerProcess
from manyhands.control.run_directory import run_name
from manyhands.control.security.keys import STANDARD_INPUT, write_join_file
from manyhands.control.servers.backup_process import BackupProcess
from manyhands.control.servers.server_ports import ServerPorts, tcp_endpoint
from manyhands.spec.addresses import is_loopback
from manyhands.spec.host_environment import shipped

__all__ = ["AgentResources"]


class AgentResources:
    def __init__(
        self,
        name: str,
        request: LaunchRequest,
        addresses: Addresses,
        job: JobDescription | None,
        say: Callable[[str], None],
    ) -> None:
        self.name, self.addresses, self.versions = name, addresses, versions()
        self._request = request
        self.exit_code = 70
        """For the run's record; set when the run ends."""
        self.coordinator: ChildProcess | None = None
        self.torch_store: TorchStoreProcess | None = None
        self.keeps_logs = False
        self.backup: BackupProcess | None = None
        self._join_file: Path | None = None
        self.template: Template | None = None
        with ExitStack() as opened:
            self._open(request, job, say, opened)
            self._opened = opened.pop_all()

    def _open(
        self, request: LaunchRequest, job: JobDescription | None, say: Callable[[str], None], opened: ExitStack
    ) -> None:
        self.signals = StopSignals(STANDARD_INPUT if request.lifeline else None)
        opened.callback(self.signals.close)
        self.directory = private_directory()
        self.guard = Guard(self.directory)
        opened.callback(self.guard.close)
        self.run_record = AgentRecord(
            _run_name(request, self.addresses),
            _command(request),
            f"ipc://{self.directory}/control",
            group_readable=request.group_readable,
        )
        opened.callback(lambda: self.run_record.close(self.exit_code))
        self.context: zmq.Context[Any] = zmq.Context()
        opened.callback(self.context.destroy, linger=500)
        if self.addresses.join is not None:
            self.link = CoordinatorLink(self.context, tcp_endpoint(*self.addresses.join), self.name, self.addresses.key)
        else:
            assert job is not None
            self._open_first_host(request, job, say, opened)
        opened.callback(self.link.close)
        several = self.addresses.listen is not None or self.addresses.join is not None
        self.server_ports = ServerPorts(self.addresses.data if several else None, request.server_address)
        opened.callback(self.server_ports.close)
        self.user_port: Port[StatusRequest] = open_port(
            self.context, zmq.ROUTER, f"ipc://{self.directory}/control", StatusRequest, bind=True
        )

    def _open_first_host(
        self, request: LaunchRequest, job: JobDescription, say: Callable[[str], None], opened: ExitStack
    ) -> None:
        if request.run_dir is not None:
            self.run_record.adopt(request.run_dir, request.overwrite)
        settings = MembershipSettings(
            run=self.run_record.run,
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
            term_floor=self.run_record.term_floor(),
            listen=self.addresses.listen,
            key=self.addresses.key,
            environment=shipped(request.environment) if self.addresses.listen is not None else {},
        )
        self.coordinator = ChildProcess("manyhands.control.coordinator.process", msgspec.msgpack.encode(config))
        opened.callback(self.coordinator.close)
        self.link = CoordinatorLink(self.context, f"ipc://{self.directory}/coordinator", self.name)
        # A script that imports manyhands will send Hello, however long it prepares.
        self._patience_s = math.inf if imports_manyhands(job.command) else request.store_after_s
        self.torch_store = TorchStoreProcess(self.addresses.data, self._patience_s)
        opened.callback(self._close_torch_store)
        self._invite(request, say, opened)

    def _invite(self, request: LaunchRequest, say: Callable[[str], None], opened: ExitStack) -> None:
        """Say what is sent unencrypted, and write the join file unless the hosts share a key already."""
        listen, key = self.addresses.listen, self.addresses.key
        if listen is None or key is None:
            return
        if not is_loopback(listen[0]):
            say(f"tensors between hosts are sent unencrypted, at {listen[0]} (--insecure-data-plane)")
        if request.master is not None:
            return
        address = tcp_endpoint(*listen).removeprefix("tcp://")
        more = f"waiting for {request.hosts_wanted - 1} more" if request.hosts_wanted > 1 else "more hosts may join"
        if request.key is not None and request.join_file is None:
            say(f"{more}: mh agent --join {address}, with the same MANYHANDS_KEY_FILE")
            return
        path = (Path(request.join_file) if request.join_file else self.directory / "join.json").absolute()
        write_join_file(path, JoinTicket(address=address, run=self.run_record.run, key=key.hex()))
        if request.removes_join_file:
            self._join_file = path
            opened.callback(self.all_have_joined)
            return
        say(f"{more}: mh agent --join {path}")

    def all_have_joined(self) -> None:
        """Remove a join file that is only for the hosts of this start of a job: the next run of the same step, or of
        the same process, has one of the same name."""
        if self._join_file is not None:
            self._join_file.unlink(missing_ok=True)
            self._join_file = None

    @property
    def worker_endpoint(self) -> str:
        """Where this host's workers and servers reach their agent."""
        return f"ipc://{self.directory}/agent"

    def spawn_context(
        self,
        job: JobDescription,
        host: str,
        *,
        output: Callable[[WorkerProcess, Stream, bytes], None],
        started: Callable[[WorkerProcess], None],
    ) -> SpawnContext:
        """What this agent's workers and servers are started with."""
        return SpawnContext(
            agent=self.worker_endpoint,
            host=host,
            run=self.run_record.run,
            job=job,
            num_workers=self._request.workers,
            data_address=self.addresses.data,
            environment=self._request.environment,
            guard=self.guard,
            output=output,
            started=started,
            servers_here=lambda plan: self.servers_here(plan.servers),
            server_prefix=f"ipc://{self.directory}/server-" if job.servers else "",
            template=lambda: self.template,
        )

    def awaits_template(self, plan: HostPlan, job: JobDescription) -> bool:
        """Whether workers of this plan wait for the process that they are forked from, which is started by this."""
        if self.template is None and not (self._request.forks and may_import_torch(job.command)):
            return False
        if self.template is None:
            threads = threads_of(self._request.environment, job.threads, sharing(plan, self._request.workers))
            # The guard recognises this agent's processes by it, should this process be killed.
            marked = {"MANYHANDS_AGENT": f"ipc://{self.directory}/template"}
            self.template = Template({**self._request.environment, **threads}, marked)
            self._opened.callback(self.template.close)
        return self.template.is_awaited()

    def servers_here(self, wanted: int) -> Sequence[int]:
        """Numbers of the servers on this host: a cluster's server task has one; else the first host has all."""
        if self._request.server is not None:
            return (self._request.server,)
        return range(wanted) if self.coordinator is not None and not self._request.server_tasks else ()

    def servers_offered(self, wanted: int | None) -> dict[int, str]:
        """Their endpoints, by number; None: as many servers as the launch asked for."""
        return self.server_ports.endpoints(self.servers_here(wanted or self._request.servers))

    def news(self) -> list[str]:
        """Warnings about helper processes, which are restarted here."""
        template = self.template.take_news() if self.template is not None else None
        return [news for news in (self.check_backup(), self.guard.tend(), template) if news is not None]

    def check_backup(self) -> str | None:
        """Run the backup process for other hosts' logs, if wanted and the run directory is known. Returns a warning."""
        if not self.keeps_logs:
            return None
        if self.backup is None and self.server_ports.address is not None and self.run_record.path is not None:
            self.backup = BackupProcess(self.run_record.path, self.server_ports.address, self.addresses.key)
            self._opened.callback(self.backup.close)
        return self.backup.tend() if self.backup is not None else None

    def renew_torch_store(self) -> None:
        """Open a store for the next generation: it must not see the values of the previous one."""
        if self.torch_store is not None:
            self.torch_store.close()
            self.torch_store = TorchStoreProcess(self.addresses.data, self._patience_s)

    def _close_torch_store(self) -> None:
        if self.torch_store is not None:
            self.torch_store.close()

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
