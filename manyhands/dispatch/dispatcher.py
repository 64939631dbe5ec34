"""`mh.dispatch.Dispatcher`: calls to step functions on a cluster, as with TensorFlow's ClusterCoordinator.

A thin layer over the cluster's hub: it packs arguments and unpacks results. Start reading at `Dispatcher.schedule`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from manyhands.comm.tensor_messages import Placeholder, pack, unpack
from manyhands.dispatch.call_router import CallOutcome
from manyhands.dispatch.cluster import Cluster
from manyhands.dispatch.hub import Hub
from manyhands.dispatch.step_functions import find_step, step_name
from manyhands.errors import PeerTimeout, UsageError

__all__ = ["Dispatcher", "PerWorkerDataset", "PerWorkerIterator", "RemoteValue"]

_numbers = itertools.count(1)


class RemoteValue:
    """The future result of a scheduled call. Made by `mh.dispatch.Dispatcher.schedule`."""

    def __init__(self, hub: Hub, outcome: CallOutcome) -> None:
        self._hub, self._outcome = hub, outcome

    @property
    def ready(self) -> bool:
        """Whether `fetch` would not wait."""
        return self._outcome.ended

    def fetch(self, timeout_s: float | None = None) -> Any:
        """Wait for the result. Raises `StepFailed` if the call failed, `CallCancelled` if it never ran.

        Args:
            timeout_s: Raise `PeerTimeout` after this many seconds. Default: no limit.
        """
        hub, outcome = self._hub, self._outcome
        with hub.changed:
            if not hub.changed.wait_for(lambda: outcome.ended, timeout_s):
                raise PeerTimeout(f"The call was not done within {timeout_s:g} s.")
        if outcome.error is not None:
            raise outcome.error
        assert outcome.frames is not None
        return unpack(outcome.frames)

    get = fetch


class PerWorkerIterator(Placeholder, frozen=True):
    """Placeholder in the arguments of a call for each worker's iterator, which continues from call to call."""

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> NoReturn:
        raise UsageError(
            "A per-worker iterator can only be advanced inside a step.", fix=["schedule(step, args=(it,))"]
        )


class PerWorkerDataset(Placeholder, frozen=True):
    """Placeholder in the arguments of a call for each worker's dataset; `iter` of it makes a `PerWorkerIterator`."""

    def __iter__(self) -> PerWorkerIterator:
        return PerWorkerIterator("iterator", next(_numbers), f"{self.number} {self.name}")


class Dispatcher:
    """Schedules calls on a started cluster. Safe from any thread.

    Each call takes effect exactly once, even if a worker or server dies. When a call fails, waiting calls are
    cancelled, running ones finish, and then the next `schedule`, `join` or `done` raises the failure, once.

    Args:
        cluster: A `mh.dispatch.Cluster` that is started.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._hub = cluster.hub

    def schedule(
        self, step: str | Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> RemoteValue:
        """Have a worker run a step. Returns at once.

        Blocks only while the cluster's `most_waiting` calls are waiting, or after a failure until no call is running.

        Args:
            step: The function, or the name that it is registered by.
            args: Arguments of the step after its context: tensors, numbers, text, and lists, tuples and dicts of these;
                per-worker datasets and iterators.
            kwargs: Keyword arguments of the step, of the same kinds.
        """
        name = _name(step)
        for value in itertools.chain(args, (kwargs or {}).values()):
            if isinstance(value, RemoteValue):
                raise UsageError(
                    f"An argument of {name!r} is a RemoteValue, not its result.", fix=["value.fetch() first"]
                )
        frames = pack((list(args), dict(kwargs or {})), f"the arguments of {name!r}")
        # Copies: the caller may change its tensors before a worker has the call.
        return RemoteValue(self._hub, self._hub.schedule(name, [bytes(frame) for frame in frames]))

    def join(self) -> None:
        """Wait until every call is done. Raises a failure that is due."""
        queue = self._hub.desk.queue
        self._hub.wait_for(lambda: queue.idle or queue.failure_due is not None)
        self._hub.raise_due()

    def done(self) -> bool:
        """Whether every call is done. Raises a failure that is due."""
        with self._hub.changed:
            self._hub.raise_due()
            return self._hub.desk.queue.idle

    def fetch(self, values: Any) -> Any:
        """Wait for results.

        Args:
            values: A `RemoteValue`, or lists, tuples and dicts that contain some; returned with the results in place of
                them.
        """
        if isinstance(values, RemoteValue):
            return values.fetch()
        if isinstance(values, list | tuple):
            found = [self.fetch(value) for value in values]
            return type(values)(*found) if hasattr(values, "_fields") else type(values)(found)
        if isinstance(values, dict):
            return {key: self.fetch(value) for key, value in values.items()}
        return values

    def create_per_worker_dataset(self, fn: str | Callable[..., Any]) -> PerWorkerDataset:
        """A dataset that every worker creates with a registered function, on first use.

        A replacement worker creates its dataset again.

        Args:
            fn: The function, or the name that it is registered by (`@mh.dispatch.remote`). Its result is iterated over.
        """
        return PerWorkerDataset("dataset", next(_numbers), _name(fn))


def _name(step: str | Callable[..., Any]) -> str:
    """The name of a registered step."""
    if isinstance(step, str):
        find_step(step)
        return step
    return step_name(step)
