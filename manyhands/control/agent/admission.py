"""Hello and Welcome: chooses the run directory, and makes workers wait until it is known.

The launch may name the directory, or the chief's Hello; else it is named after the run. If it cannot be used, the
whole run is refused before any worker begins.
"""

from __future__ import annotations

from collections.abc import Callable

from manyhands.control.agent.host_workers import HostWorkers
from manyhands.control.agent.run_record import AgentRecord
from manyhands.control.agent.worker_channel import WorkerChannel
from manyhands.control.messages.launch_request import LaunchRequest
from manyhands.control.messages.worker_messages import RunFacts
from manyhands.control.processes.worker_process import WorkerProcess
from manyhands.errors import ManyhandsError

__all__ = ["Admission"]


class Admission:
    def __init__(
        self, request: LaunchRequest, run_record: AgentRecord, *, owner: bool, say: Callable[[str], None]
    ) -> None:
        self._request, self._run_record, self._owner, self._say = request, run_record, owner, say
        self._waiting: list[WorkerProcess] = []
        self.refusal: ManyhandsError | None = None

    def new_generation(self) -> None:
        self._waiting.clear()

    def greet(
        self,
        worker: WorkerProcess,
        facts: RunFacts,
        host_workers: HostWorkers,
        channel: WorkerChannel,
        stop: str | None,
    ) -> None:
        # In an elastic run the chief may change; any worker may name it, as all run the same script.
        if self._owner and (worker.identity.rank == 0 or host_workers.elastic):
            overwrite = self._request.overwrite or facts.overwrite
            try:
                changed = self._run_record.adopt(
                    self._request.run_dir or facts.run_dir, overwrite, host_workers.generation
                )
            except ManyhandsError as error:
                channel.refuse(worker, error)
                self.refusal = error
                return
            if changed:
                self._move_logs(host_workers)
        self._waiting.append(worker)
        self.welcome(channel, stop)

    def welcome(self, channel: WorkerChannel, stop: str | None) -> None:
        """Welcome the waiting workers, if the directory is known by now."""
        if self._run_record.path is not None:
            for worker in self._waiting:
                channel.welcome(worker, self._run_record.run, self._run_record.path, stop)
            self._waiting.clear()

    def adopt_default(self, host_workers: HostWorkers | None) -> None:
        """Use the default directory: none was named so far, and now it is needed."""
        if not self._owner or self._run_record.directory is not None:
            return
        try:
            self._run_record.adopt(None, False, host_workers.generation if host_workers else None)
        except ManyhandsError as error:
            self._say(str(error))
            return
        self._move_logs(host_workers)

    def visit(self, path: str, log_base: int, host_workers: HostWorkers | None) -> None:
        """On other hosts: use the first host's directory, or the one that this host's launch names."""
        if not self._owner and self._run_record.visit(self._request.run_dir or path, log_base):
            self._move_logs(host_workers)

    def _move_logs(self, host_workers: HostWorkers | None) -> None:
        if host_workers is not None and (folder := self._run_record.logs(host_workers.plan.attempt)) is not None:
            host_workers.write_logs_to(folder)
        self._run_record.discard_provisional()
