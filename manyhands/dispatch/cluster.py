"""`mh.dispatch.Cluster`: workers and variable servers as child processes of one object.

It starts them, replaces those that are lost, and ends them; they also end with the process of the `Cluster`, however it
ends. Calls go through `mh.dispatch.Dispatcher`. Start reading at `Cluster`.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from manyhands.control.messages.launch_request import JoinTicket
from manyhands.control.security.keys import new_key, write_join_file
from manyhands.dispatch.call_queue import MOST_WAITING
from manyhands.dispatch.child_processes import in_child
from manyhands.dispatch.step_functions import import_steps, modules_of_steps, sendable
from manyhands.errors import EnvironmentProblem, SpecError, UsageError
from manyhands.launcher.script_exit import watch_ending

if TYPE_CHECKING:
    from torch import Tensor

    from manyhands.dispatch.hub import Hub
    from manyhands.dispatch.variable_ledger import VariableInfo

__all__ = ["Cluster"]

START_TIMEOUT_S = 120.0


class Cluster:
    """Processes that run steps, and processes that store variables, on this host.

    Subclasses may override the four `on_...` methods; they are called in a thread of the cluster, and must not wait for
    the cluster.

    Args:
        workers: Number of processes that run steps; 0 if all workers join from elsewhere.
        servers: Number of processes that store variables.
        steps: The modules, or Python files, of the step functions. Default: those of all steps registered when `start`
            is called.
        seed: Seed of the workers' randomness.
        threads: Number of torch threads in each process.
        listen: An address of this host at which workers of other hosts may join. Default: none.
        silent_s: A worker that sends no heartbeat for this many seconds counts as lost. Raise it if steps hold the
            interpreter lock for long.
        most_waiting: While this many calls wait, `schedule` blocks.
    """

    def __init__(
        self,
        workers: int,
        servers: int = 1,
        *,
        steps: str | Sequence[str] | None = None,
        seed: int = 0,
        threads: int = 1,
        listen: str = "",
        silent_s: float = 30.0,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        watch_ending()
        counts = {"workers": (workers, 0), "servers": (servers, 0), "threads": (threads, 1)}
        for name, (value, least) in (counts | {"most_waiting": (most_waiting, 1)}).items():
            _check_count(name, value, least)
        if silent_s <= 0:
            raise SpecError(f"silent_s is {silent_s!r}, but must be above 0.", fix=["silent_s=30"])
        if workers == 0 and not listen:
            raise SpecError("A cluster without workers cannot run steps.", fix=["workers=2", 'listen="10.0.0.1"'])
        self._steps = [steps] if isinstance(steps, str) else steps
        self._settings: dict[str, Any] = {
            "workers": workers,
            "servers": servers,
            "seed": seed,
            "threads": threads,
            "listen": listen,
            "silent_s": silent_s,
            "most_waiting": most_waiting,
        }
        self._hub: Hub | None = None

    # ---- start and end ---------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start all processes; returns when all are ready. Raises the error if one cannot start."""
        if in_child():
            raise UsageError(
                f"A cluster was started inside a {in_child()} of a cluster.",
                where="Cluster.start",
                fix=['if __name__ == "__main__": around it, in the module of the steps'],
            )
        if self._hub is not None:
            raise UsageError(
                "This cluster was started before.", where="Cluster.start", fix=["a new mh.dispatch.Cluster"]
            )
        from manyhands.dispatch.hub import Hub, HubSettings

        import_steps(self._steps or [])
        modules = list(self._steps) if self._steps is not None else modules_of_steps()
        key = new_key() if self._settings["listen"] else b""
        self._hub = hub = Hub(HubSettings(steps=modules, key=key, **self._settings), self._notify)
        # Children end properly if they are sent Stop; without it they are killed with this process.
        atexit.register(hub.close)
        try:
            self._await_all(hub)
        except BaseException:
            self.shutdown()
            raise
        return self

    def start_server(self, count: int = 1) -> list[int]:
        """Add servers, and wait until they are ready; returns their numbers. Later variables are created there.

        Args:
            count: How many.
        """
        _check_count("count", count, 1)
        numbers = self.hub.add_servers(count)
        self._await_all(self.hub)
        return numbers

    def _await_all(self, hub: Hub) -> None:
        started = time.monotonic()
        if not hub.wait_for(lambda: hub.all_ready, START_TIMEOUT_S):
            raise EnvironmentProblem(
                f"Not all processes of the cluster were ready after {time.monotonic() - started:.0f} s.",
                fix=["fewer workers", "step modules that import faster"],
            )

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the cluster is shut down; returns whether it is. Raises the error if the cluster failed.

        Args:
            timeout_s: Return after this many seconds, even if it is not. Default: no limit.
        """
        hub = self.hub
        with hub.changed:
            ended = hub.changed.wait_for(lambda: hub.closed, timeout_s)
        if hub.broken is not None:
            raise hub.broken
        return ended

    def shutdown(self) -> None:
        """End every process and wait for it. Unfinished calls are cancelled. May be called again."""
        if self._hub is not None:
            self._hub.close()
            atexit.unregister(self._hub.close)

    def __enter__(self) -> Self:
        return self.start() if self._hub is None else self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.shutdown()

    @property
    def hub(self) -> Hub:
        # For our own modules; exists once the cluster is started.
        if self._hub is None:
            raise UsageError(
                "The cluster is not started.", fix=["cluster.start()", "with mh.dispatch.Cluster(...) as cluster:"]
            )
        return self._hub

    # ---- for subclasses --------------------------------------------------------------------------------------

    def on_worker_started(self, number: int, process: str) -> None:
        """A worker is ready; also called for replacements.

        Args:
            number: The worker's number, from 0.
            process: "pid 4121", with " on HOST" if it joined from elsewhere.
        """

    def on_worker_lost(self, number: int, why: str) -> None:
        """A worker was lost; its call is assigned to another.

        Args:
            number: The worker's number.
            why: How it ended, as text.
        """

    def on_server_started(self, number: int, process: str) -> None:
        """A server is ready; a restarted one has its variables again.

        Args:
            number: The server's number, from 0.
            process: "pid 4121".
        """

    def on_server_lost(self, number: int, why: str) -> None:
        """A server was lost; another one replaces it, with its variables.

        Args:
            number: The server's number.
            why: How it ended, as text.
        """

    def _notify(self, what: str, role: Literal["worker", "server"], number: int, detail: str) -> None:
        hook = getattr(self, f"on_{role}_{what}")
        hook(number, detail)

    # ---- state and variables ---------------------------------------------------------------------------------

    @property
    def worker_pids(self) -> dict[int, int]:
        """Process ids of ready workers that this cluster started, by number."""
        return self.hub.pids("worker")

    @property
    def server_pids(self) -> dict[int, int]:
        """Process ids of ready servers, by number."""
        return self.hub.pids("server")

    @property
    def refused(self) -> int:
        """Number of ignored messages: from unknown senders, late, or malformed."""
        return self.hub.refused

    def variables(self) -> list[VariableInfo]:
        """All variables, by name: shape, type, bytes, server, and number of changes."""
        with self.hub.changed:
            return sorted(self.hub.desk.ledger.catalogue.values(), key=lambda info: info.name)

    def read(self, name: str) -> Tensor:
        """A copy of a variable, with the changes of all completed calls.

        Args:
            name: The variable's name.
        """
        return self.hub.read(name)

    def assign(self, name: str, value: Tensor) -> None:
        """Set a variable; if it does not exist, create it on the server with the fewest bytes.

        Args:
            name: The variable's name.
            value: Its new value. An existing variable keeps its shape and type.
        """
        self.hub.change(name, "assign", sendable(name, value))

    def add(self, name: str, value: Tensor) -> None:
        """Add to a variable.

        Args:
            name: The variable's name.
            value: The tensor to add, of the same shape and type.
        """
        self.hub.change(name, "add", sendable(name, value))

    def write_join_file(self, path: str | Path) -> None:
        """Write a join file, with which workers on other hosts join: `mh.dispatch.RemoteWorker(path)`.

        Args:
            path: The file. It contains the cluster's key, so only its owner may read it.
        """
        address = self.hub.tcp_address.removeprefix("tcp://")
        if not address:
            raise UsageError("This cluster does not listen.", fix=['mh.dispatch.Cluster(..., listen="10.0.0.1")'])
        write_join_file(Path(path), JoinTicket(address, "", self.hub.settings.key.hex()))


def _check_count(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SpecError(f"{name} is {value!r}, but must be a whole number from {least}.", fix=[f"{name}=2"])
