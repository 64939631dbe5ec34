"""TensorFlow's `Server`: this process as one task of a cluster, given in code instead of TF_CONFIG."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manyhands.errors import UsageError
from manyhands.launcher.launch import wait_for_end
from manyhands.spec.cluster import ClusterSpec, ClusterTask

__all__ = ["Server"]


class Server:
    """This process as one task of a cluster. Chief and worker tasks pass it to their strategy (`cluster=server`); the
    others `join`.

    Args:
        cluster: The jobs and their addresses, as a `mh.ClusterSpec` or a dict for one.
        job: The job of this process: "chief", "worker", "ps" or "evaluator".
        index: Its index in the job, from 0.
    """

    def __init__(self, cluster: ClusterSpec | Mapping[str, Any], job: str = "worker", index: int = 0) -> None:
        self.task = ClusterTask(cluster, job, index, where=f'Server(cluster, "{job}", {index})')

    @property
    def target(self) -> str:
        """The address of this task in the cluster; empty for an evaluator outside the cluster."""
        address = self.task.address
        return f"{address[0]}:{address[1]}" if address else ""

    def join(self) -> int:
        """Wait for the end of the run, as a ps task does under the mirrored strategies. Returns 0.

        An evaluator that joins only waits, too: one that passes this to its strategy evaluates each checkpoint.
        """
        if self.task.trains:
            raise UsageError(
                f"Task {self.task.job} {self.task.index} trains, so it cannot only wait.",
                where="Server.join",
                fix=["mh.Trainer(..., strategy=mh.Mirrored(cluster=server))"],
            )
        return wait_for_end(self.task.chief_address)
