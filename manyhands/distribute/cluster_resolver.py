"""Cluster resolvers: which cluster this is, and which of its tasks this process is.

Start reading at `SimpleClusterResolver`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import manyhands as mh
from manyhands.distribute.train.cluster import ClusterSpec, Server
from manyhands.distribute.train.notices import not_here, refuse_unknown
from manyhands.errors import ClusterError, SpecError
from manyhands.spec.cluster import from_tf_config
from manyhands.spec.keyword_check import checked_class
from manyhands.spec.load import environment

__all__ = ["RunResolver", "SimpleClusterResolver", "TFConfigClusterResolver", "run_resolver", "with_cluster"]

UNUSED = (("rpc_layer", "grpc"), ("rpc_layer", None), ("environment", ""), ("num_accelerators", None))
"""TensorFlow's options with values that mean nothing else here."""
KNOWN = ("cluster_spec", "master", "task_type", "task_id", "rpc_layer", "environment", "num_accelerators")
NOT_HERE = dict.fromkeys(
    ("GCEClusterResolver", "KubernetesClusterResolver", "SlurmClusterResolver", "TPUClusterResolver", "UnionResolver"),
    ("clusters are those of mh run, which docs/launching.md starts on several hosts", "TFConfigClusterResolver()"),
)


def __getattr__(name: str) -> Any:
    if name in NOT_HERE:
        raise not_here(name, NOT_HERE)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@checked_class()
class SimpleClusterResolver:
    """A cluster that is given in code: `train.ClusterSpec`, and the task of this process.

    Args:
        cluster_spec: The cluster, as a `ClusterSpec`, a dict or pairs.
        master: Only "".
        task_type: The job of this process.
        task_id: Its index there.
        options: None: an unknown one is refused by name.
    """

    def __init__(
        self,
        cluster_spec: Any,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        **options: Any,
    ) -> None:
        unused = {name: value for name, value in options.items() if (name, value) not in UNUSED}
        refuse_unknown(type(self).__name__, {**unused, **({"master": master} if master else {})}, KNOWN)
        self._spec = cluster_spec if isinstance(cluster_spec, ClusterSpec) else ClusterSpec(cluster_spec)
        self.task_type, self.task_id = task_type, task_id
        if task_type is not None:
            self.server()  # a task that the cluster does not have is refused here

    def cluster_spec(self) -> ClusterSpec:
        return self._spec

    def server(self) -> mh.Server:
        """This process's task, for a strategy's `cluster=`."""
        self.check_task()
        return Server(self._spec, self.task_type, self.task_id).ours

    def check_task(self) -> None:
        """`ClusterError` unless it is known which task this process is."""
        if self.task_type is None:
            raise ClusterError(
                "Which task of the cluster is this process?",
                where=type(self).__name__,
                fix=['task_type="worker", task_id=0'],
            )

    def master(self, task_type: str | None = None, task_id: int | None = None) -> str:
        """The address of a task; by default of this process.

        Args:
            task_type: Its job.
            task_id: Its index there.
        """
        job = task_type or self.task_type
        if job is None:
            return ""
        index = (self.task_id if task_id is None else task_id) or 0
        return self._spec.task_address(job, index)


@checked_class()
class TFConfigClusterResolver(SimpleClusterResolver):
    """The cluster of the variable TF_CONFIG, and this process's task in it.

    Args:
        task_type: As in TF_CONFIG, from which the run begins; another one is refused.
        task_id: The same.
        options: None: an unknown one is refused by name.
    """

    def __init__(self, task_type: str | None = None, task_id: int | None = None, **options: Any) -> None:
        text = environment().get("TF_CONFIG", "")
        if not text:
            raise ClusterError(
                "TF_CONFIG is not set.",
                where="TFConfigClusterResolver",
                fix=["SimpleClusterResolver(cluster, task_type=..., task_id=...)", "no resolver, under mh run"],
            )
        task = from_tf_config(text)
        asked = (task_type or task.job, task.index if task_id is None else task_id)
        if asked != (task.job, task.index):
            raise ClusterError(
                f"TF_CONFIG says that this process is {task.job} {task.index}, and the resolver {asked[0]} {asked[1]}.",
                where="TFConfigClusterResolver",
                fix=["no task_type and no task_id", "SimpleClusterResolver(...), without TF_CONFIG"],
            )
        super().__init__(
            task.cluster,
            task_type=task_type or task.job,
            task_id=task.index if task_id is None else task_id,
            **options,
        )


class NoTasks(ClusterSpec):
    """The cluster of a run whose workers have no addresses: it has no jobs."""

    def __init__(self) -> None:
        self.job_of, self._jobs, self.unknown = {}, {}, []


class RunResolver:
    """The tasks of a run that `mh run` started: all are workers, by their numbers."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self.task_type = "worker"

    @property
    def task_id(self) -> int:
        return int(self._strategy.hands.rank)

    def cluster_spec(self) -> ClusterSpec:
        """Without jobs: nothing listens."""
        return NoTasks()

    def master(self, task_type: str | None = None, task_id: int | None = None) -> str:
        return ""


def run_resolver(strategy: Any) -> RunResolver | TFConfigClusterResolver:
    """What TensorFlow finds in TF_CONFIG, or the numbers of the run's workers."""
    return TFConfigClusterResolver() if environment().get("TF_CONFIG") else RunResolver(strategy)


def with_cluster(resolver: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A strategy's settings, with the cluster of a resolver."""
    if resolver is None:
        return dict(settings)
    if not isinstance(resolver, SimpleClusterResolver):
        raise SpecError(
            f"cluster_resolver is {resolver!r}.",
            where="cluster_resolver",
            fix=["SimpleClusterResolver(cluster, task_type=..., task_id=...)", "TFConfigClusterResolver()"],
        )
    if "cluster" in settings:
        raise SpecError("Both cluster_resolver and cluster are given.", where="cluster_resolver", fix=["one of them"])
    if isinstance(resolver, TFConfigClusterResolver):
        return dict(settings)  # the launcher reads TF_CONFIG itself
    if resolver.task_type is None:
        return dict(settings)  # for a coordinator; `check_task` refuses a run
    return {**settings, "cluster": resolver.server()}
