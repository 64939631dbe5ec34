"""`mh.dispatch.RemoteWorker`: one worker of a cluster, started by the cluster or by hand."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from manyhands.control.security.keys import client_curve, key_of, read_join_file
from manyhands.dispatch.step_functions import import_steps
from manyhands.dispatch.worker_session import WorkerConfig, WorkerSession
from manyhands.errors import UsageError

__all__ = ["RemoteWorker"]


class RemoteWorker:
    """A worker started by hand: `mh.dispatch.RemoteWorker("cluster.join", steps="mysteps").start()`, in a separate
    process.

    Args:
        where: The path of a join file, which `cluster.write_join_file(path)` wrote, or a `WorkerConfig`.
        steps: The modules, or Python files, of the step functions.
        key: The cluster's key, if `where` is a `WorkerConfig`; a join file has it.
    """

    def __init__(self, where: str | Path | WorkerConfig, *, steps: str | Sequence[str] = (), key: bytes = b"") -> None:
        self._key = key
        if not isinstance(where, WorkerConfig):
            ticket = read_join_file(where)
            self._key = key_of(ticket)
            modules = (steps,) if isinstance(steps, str) else tuple(steps)
            where = WorkerConfig(address=f"tcp://{ticket.address}", steps=modules)
        self.config = where
        self.session: WorkerSession | None = None
        """None while it is not in the cluster."""
        self._error: BaseException | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> RemoteWorker:
        """Join the cluster, and run calls in a thread of this process. Returns once the cluster has accepted it."""
        self._enter()
        self._thread = threading.Thread(target=self._serve_quietly, name="manyhands-dispatch-worker", daemon=True)
        self._thread.start()
        return self

    def run(self) -> None:
        """Join the cluster and run calls, in this thread, until the cluster ends. `PeerLost` if it stops answering."""
        self._enter()
        self._serve()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the thread of `start` ends; returns whether it has ended. Raises the error that ended it.

        Args:
            timeout_s: Return after this many seconds, even if it has not ended. Default: no limit.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
        if self._error is not None:
            raise self._error
        return True

    def stop(self) -> None:
        """Leave the cluster after the current call; further calls go to other workers."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _enter(self) -> None:
        if self.session is not None:
            raise UsageError(
                "This worker is in its cluster already.", where="mh.dispatch.RemoteWorker", fix=["worker.stop() first"]
            )
        import_steps(self.config.steps)
        self._stopping.clear()
        self._error = None
        self.session = WorkerSession(self.config, client_curve(self._key) if self._key else None)

    def _serve(self) -> None:
        assert self.session is not None
        try:
            self.session.serve(self._stopping.is_set)
        finally:
            self.session.close()
            self.session = None

    def _serve_quietly(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self._error = error
