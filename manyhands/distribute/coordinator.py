"""`ClusterCoordinator`: functions on the workers of a cluster, over `mh.dispatch`.

Start reading at `ClusterCoordinator.schedule`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import manyhands as mh
from manyhands.dispatch import Cluster, Dispatcher, RemoteValue
from manyhands.distribute.train.processes import TFCluster
from manyhands.errors import SpecError
from manyhands.spec.keyword_check import checked_class

__all__ = ["ClusterCoordinator", "RemoteValue"]


@checked_class()
class ClusterCoordinator:
    """`mh.dispatch.Dispatcher`: schedules functions on workers, each to take effect exactly once.

    A function is registered with `@mh.dispatch.remote`, at the top of a module, and takes the call's context first:
    `ctx.variables`, `ctx.assign` and `ctx.add` are the variables of the cluster's servers.

    Args:
        strategy: A `train.TFCluster` or `mh.dispatch.Cluster`; or a `ParameterServerStrategy`, for which a cluster of
            the resolver's workers and servers, or of `workers=2, servers=1`, is started on this host.
    """

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self._owns = not isinstance(strategy, Cluster)
        if isinstance(strategy, Cluster):
            self.cluster = strategy.__enter__()
        else:
            choice = getattr(strategy, "choice", None)
            if not isinstance(choice, mh.ParameterServer):
                raise SpecError(
                    f"{type(strategy).__name__} has no parameter servers.",
                    where="ClusterCoordinator",
                    fix=["ParameterServerStrategy(workers=2)", "train.TFCluster(cluster_spec)"],
                )
            spec = strategy._resolver.cluster_spec() if strategy._resolver is not None else None
            if spec is not None:
                self.cluster = TFCluster(spec).start()
            else:
                self.cluster = Cluster(choice.workers or 1, choice.servers or 1).start()
        self._dispatcher = Dispatcher(self.cluster)

    def schedule(
        self, fn: str | Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> RemoteValue:
        """Have a worker call a function; returns at once.

        Args:
            fn: The function, or its name.
            args: Its arguments after the context.
            kwargs: Its keyword arguments.
        """
        return self._dispatcher.schedule(fn, args, kwargs)

    def join(self) -> None:
        """Wait until every call is done; raises the error of one that failed."""
        self._dispatcher.join()

    def done(self) -> bool:
        """Whether every call is done."""
        return self._dispatcher.done()

    def fetch(self, val: Any) -> Any:
        """Wait for results, in any structure.

        Args:
            val: What `schedule` returned, or lists, tuples and dicts of it.
        """
        return self._dispatcher.fetch(val)

    def create_per_worker_dataset(self, dataset_fn: str | Callable[..., Any]) -> Any:
        """A dataset that every worker makes with a registered function.

        Args:
            dataset_fn: The function, or its name.
        """
        return self._dispatcher.create_per_worker_dataset(dataset_fn)

    def shutdown(self) -> None:
        """End the cluster, if it was started here."""
        if self._owns:
            self.cluster.shutdown()
