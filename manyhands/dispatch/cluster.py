"""`mh.Cluster`: workers and variable servers as child processes, held by one object.

It starts them, starts others in the place of those that are lost, and ends them; with it, or with the process that it
is in, however that ends. Calls go to it through `mh.Coordinator`. Start reading at `Cluster`.
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
from manyhands.dispatch.step_functions import import_steps, places_of_steps, sendable
from manyhands.errors import EnvironmentProblem, SpecError, UsageError
from manyhands.launcher.script_exit import watch_ending

if TYPE_CHECKING:
    from torch import Tensor

    from manyhands.dispatch.hub import Hub
    from manyhands.dispatch.variable_ledger import VariableInfo

__all__ = ["Cluster"]

START_TIMEOUT_S = 120.0


class Cluster:
    """Processes that run steps, and processes that keep variables, on this host.

    Subclasses may override the four `on_...` methods; they are called in a thread of the cluster, and must not wait for
    it.

    Args:
        workers: Processes that run steps; 0 where all of them join from elsewhere.
        servers: Processes that keep variables.
        steps: The modules, or Python files, of the step functions. Default: all that are registered here by the time of
            `start`.
        seed: Of the workers' randomness.
        threads: Of torch, in each process.
        listen: An address of this host at which workers of other hosts may join. Default: none.
        silent_s: A worker that gives no sign of life for so many seconds counts as lost. Raise it where steps keep the
            interpreter to themselves for long.
        most_waiting: Where so many calls wait, `schedule` does not return at once.
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
            raise SpecError(
                "A cluster without workers has nobody to run steps.", fix=["workers=2", 'listen="10.0.0.1"']
            )
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

    # ---- its life --------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start all processes; returns when every one of them is ready. Raises what keeps one from it."""
        if in_child():
            raise UsageError(
                f"A cluster was started inside a {in_child()} of a cluster.",
                where="Cluster.start",
                fix=['if __name__ == "__main__": around it, in the module of the steps'],
            )
        if self._hub is not None:
            raise UsageError("This cluster was started before.", where="Cluster.start", fix=["a new mh.Cluster"])
        from manyhands.dispatch.hub import Hub, HubSettings

        import_steps(self._steps or [])
        places = list(self._steps) if self._steps is not None else places_of_steps()
        key = new_key() if self._settings["listen"] else b""
        self._hub = hub = Hub(HubSettings(steps=places, key=key, **self._settings), self._news)
        # A child that is not told to stop is killed with this process; the others end as they should.
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
        began = time.monotonic()
        if not hub.wait_for(lambda: hub.all_ready, START_TIMEOUT_S):
            raise EnvironmentProblem(
                f"Not all processes of the cluster were ready after {time.monotonic() - began:.0f} s.",
                fix=["fewer workers", "modules of steps that are quicker to import"],
            )

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the cluster is shut down; returns whether it is. Raises what it broke down of.

        Args:
            timeout_s: Return after so many seconds, even if it is not. Default: wait for as long as it takes.
        """
        hub = self.hub
        with hub.changed:
            ended = hub.changed.wait_for(lambda: hub.closed, timeout_s)
        if hub.broken is not None:
            raise hub.broken
        return ended

    def shutdown(self) -> None:
        """End every process and wait for it. Calls that are not done are cancelled. May be called again."""
        if self._hub is not None:
            self._hub.close()
            atexit.unregister(self._hub.close)

    def __enter__(self) -> Self:
        return self.start() if self._hub is None else self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.shutdown()

    @property
    def hub(self) -> Hub:
        # The thread behind it, for our own modules; there is one once the cluster is started.
        if self._hub is None:
            raise UsageError("The cluster is not started.", fix=["cluster.start()", "with mh.Cluster(...) as cluster:"])
        return self._hub

    # ---- for subclasses --------------------------------------------------------------------------------------

    def on_worker_started(self, number: int, process: str) -> None:
        """A worker is ready; also one that replaces another.

        Args:
            number: The worker's, from 0.
            process: "pid 4121", with " on HOST" where it joined from elsewhere.
        """

    def on_worker_lost(self, number: int, why: str) -> None:
        """A worker is gone; its call is given to another.

        Args:
            number: The worker's.
            why: What is known of its end, as text.
        """

    def on_server_started(self, number: int, process: str) -> None:
        """A server is ready, with all the variables that it had.

        Args:
            number: The server's, from 0.
            process: "pid 4121".
        """

    def on_server_lost(self, number: int, why: str) -> None:
        """A server is gone; another replaces it, with its variables.

        Args:
            number: The server's.
            why: What is known of its end, as text.
        """

    def _news(self, what: str, role: Literal["worker", "server"], number: int, detail: str) -> None:
        hook = getattr(self, f"on_{role}_{what}")
        hook(number, detail)

    # ---- what there is ---------------------------------------------------------------------------------------

    @property
    def worker_pids(self) -> dict[int, int]:
        """Of workers that this cluster started and that are ready, by number."""
        return self.hub.pids("worker")

    @property
    def server_pids(self) -> dict[int, int]:
        """Of servers that are ready, by number."""
        return self.hub.pids("server")

    @property
    def refused(self) -> int:
        """Messages that did not count: of strangers, late, or malformed."""
        return self.hub.refused

    def variables(self) -> list[VariableInfo]:
        """All variables, by name: shape, type, bytes, server, and how many changes made them what they are."""
        with self.hub.changed:
            return sorted(self.hub.desk.ledger.catalogue.values(), key=lambda info: info.name)

    def read(self, name: str) -> Tensor:
        """A variable as all calls that are done have made it: a copy.

        Args:
            name: The variable's.
        """
        return self.hub.read(name)

    def assign(self, name: str, value: Tensor) -> None:
        """Set a variable; one that is not there is created, on the server with the fewest bytes.

        Args:
            name: The variable's.
            value: Its new value. A variable that is there keeps its shape and type.
        """
        self.hub.change(name, "assign", sendable(name, value))

    def add(self, name: str, value: Tensor) -> None:
        """Add to a variable.

        Args:
            name: The variable's.
            value: What to add, of its shape and type.
        """
        self.hub.change(name, "add", sendable(name, value))

    def write_join_file(self, path: str | Path) -> None:
        """Write what a worker of another host needs to join, for `mh.Worker(path)`.

        Args:
            path: The file. It holds the cluster's key, so only its owner may read it.
        """
        address = self.hub.tcp_address.removeprefix("tcp://")
        if not address:
            raise UsageError("This cluster does not listen.", fix=['mh.Cluster(..., listen="10.0.0.1")'])
        write_join_file(Path(path), JoinTicket(address, "", self.hub.settings.key.hex()))


def _check_count(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SpecError(f"{name} is {value!r}, but must be a whole number from {least}.", fix=[f"{name}=2"])
