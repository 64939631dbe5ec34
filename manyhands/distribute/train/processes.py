"""A cluster and a worker as classes to subclass: `TFCluster` and `PSWorker`, over `mh.dispatch`.

Start reading at `TFCluster`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import manyhands as mh
from manyhands.dispatch import Cluster, RemoteWorker
from manyhands.distribute.train.cluster import ClusterSpec
from manyhands.distribute.train.notices import refuse_unknown, say_once
from manyhands.errors import ClusterError, SpecError
from manyhands.spec.keyword_check import checked_keywords

__all__ = ["PSWorker", "TFCluster", "limit_gpu_memory"]

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class TFCluster(Cluster):
    """`mh.dispatch.Cluster` from a cluster spec: a process for each worker and ps task. `start`, `join`,
    `start_server`, `shutdown`; a subclass may override `on_worker_lost` and its like.

    Args:
        cluster: The cluster: how many workers and servers there are. The addresses must be this host's; the processes
            use none of them, nothing listens. On other hosts: `PSWorker`.
        options: Those of `mh.dispatch.Cluster`: steps, seed, threads, listen, ...
    """

    def __init__(self, cluster: mh.ClusterSpec | Mapping[str, Any], **options: Any) -> None:
        _check_options("TFCluster", Cluster, ("cluster",), options)
        self.cluster_spec = cluster if isinstance(cluster, mh.ClusterSpec) else ClusterSpec(cluster)
        spec = ClusterSpec(self.cluster_spec).in_our_names()
        count = {job: spec.num_tasks(job) for job in spec.jobs}
        for job in spec.jobs:
            for index in spec.task_indices(job):
                address = spec.task_address(job, index)
                if address.rpartition(":")[0] not in LOOPBACK:
                    raise ClusterError(
                        f"/job:{job}/task:{index} is at {address}, and a cluster starts processes of this host.",
                        where="TFCluster",
                        fix=["PSWorker(join_file).start(), on that host", 'mh.dispatch.Cluster(0, listen="10.0.0.1")'],
                    )
        super().__init__(count.get("worker", 0), count.get("ps", 0), **options)


class PSWorker(RemoteWorker):
    """`mh.dispatch.RemoteWorker`: a worker that this process is. `start`, `stop`, `session`, `config`.

    Args:
        where: The join file of the cluster, or a configuration.
        memory_limit: Megabytes of each GPU's memory that it may take. Without a GPU nothing is limited, said once.
        options: Those of `mh.dispatch.RemoteWorker`: steps, key.
    """

    def __init__(self, where: Any, *, memory_limit: int | None = None, **options: Any) -> None:
        _check_options("PSWorker", RemoteWorker, ("where", "memory_limit"), options)
        super().__init__(Path(where) if isinstance(where, str) else where, **options)
        self.is_limited = memory_limit is not None and limit_gpu_memory(memory_limit)
        """Whether the memory limit holds."""


def _check_options(owner: str, inherited: type, own: tuple[str, ...], options: Mapping[str, Any]) -> None:
    """Refuse what is neither an option of the class that this one extends, nor its own."""
    settings = [one for one in inspect.signature(inherited).parameters if one not in ("workers", "servers", "where")]
    refuse_unknown(owner, {name: value for name, value in options.items() if name not in settings}, [*own, *settings])


@checked_keywords
def limit_gpu_memory(megabytes: int) -> bool:
    """Limit what this process takes of each GPU's memory; False, said once, where there is no GPU.

    Args:
        megabytes: The limit.
    """
    if megabytes < 1:
        raise SpecError(f"The memory limit is {megabytes} MB.", where="memory_limit", fix=["memory_limit=1024"])
    if not torch.cuda.is_available():
        say_once(f"There is no GPU: the limit of {megabytes} MB has no effect, and the CPU's memory is used.")
        return False
    for index in range(torch.cuda.device_count()):
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, megabytes * 2**20 / total), index)
    return True
