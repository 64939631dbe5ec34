"""`ClusterSpec` and `Server` as TensorFlow 1 spells them: any names of jobs, `job_name=`, `task_index=`.

Ours know four jobs. A cluster with one job of another name, such as "local", has workers only. One with several jobs,
some of other names, is a list of addresses, of which no server can be a task. Start reading at `ClusterSpec`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import manyhands as mh
from manyhands.distribute.train.notices import refuse_unknown
from manyhands.errors import ClusterError, NotHere
from manyhands.spec.keyword_check import checked_class

__all__ = ["ClusterSpec", "Server", "Target"]

JOBS = ("chief", "worker", "ps", "evaluator")
SAME_JOB = {"master": "chief"}
UNUSED = {"protocol": "grpc", "config": None, "start": True}
"""TensorFlow's other arguments, and the values that mean nothing else here."""
_NONE = object()


@checked_class()
class ClusterSpec(mh.ClusterSpec):
    """`mh.ClusterSpec`, from a dict or from pairs, with any job names; it equals one of ours with the same jobs.

    "master" is the chief. If the cluster has one job, its tasks are workers, whatever its name.

    Args:
        cluster: A dict from job to addresses, a list of such pairs, or another `ClusterSpec`.
    """

    def __init__(self, cluster: mh.ClusterSpec | Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        jobs = _as_dict(cluster)
        self.job_of = _our_jobs(jobs)
        """Our name of each job, by the name that it was given."""
        self.unknown = [name for name, job in self.job_of.items() if job not in JOBS]
        """Jobs that are none of ours."""
        if self.unknown:
            self._jobs = {name: mh.ClusterSpec({"worker": tasks})._jobs["worker"] for name, tasks in jobs.items()}
        else:
            super().__init__({self.job_of[name]: tasks for name, tasks in jobs.items()})

    @property
    def jobs(self) -> list[str]:
        """Names of the jobs, as they were given."""
        return sorted(self.job_of)

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Tasks by the names of the jobs, as they were given."""
        tasks = super().as_dict()
        return {name: tasks[self.job_of[name]] for name in self.jobs}

    def _of(self, job: str) -> dict[int, str]:
        return super()._of(self.job_of.get(job, job))

    def in_our_names(self) -> mh.ClusterSpec:
        """The cluster with our names of the jobs; `ClusterError` where some are none of ours."""
        if self.unknown:
            raise ClusterError(
                f"Of several jobs each must be known, and {', '.join(map(repr, self.unknown))} is not.",
                where="ClusterSpec",
                fix=[f'"{job}"' for job in JOBS],
            )
        return mh.ClusterSpec({self.job_of[name]: tasks for name, tasks in self.as_dict().items()})


def _as_dict(cluster: Any) -> dict[str, Any]:
    if isinstance(cluster, mh.ClusterSpec):
        return dict(cluster.as_dict())
    try:
        pairs = list(cluster.items() if isinstance(cluster, Mapping) else cluster)
        dict(pairs)
    except (TypeError, ValueError):
        raise ClusterError(
            f"A cluster is a dict or a list of pairs, not {cluster!r}.",
            where="ClusterSpec",
            fix=['ClusterSpec({"worker": ["10.0.0.1:2222"]})', 'ClusterSpec([("worker", ["10.0.0.1:2222"])])'],
        ) from None
    names = [str(name) for name, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ClusterError(
            f"The job {twice!r} is given twice.", where="ClusterSpec", fix=[f'("{twice}", ["a:2222", "b:2222"])']
        )
    return {str(name): tasks for name, tasks in pairs}


def _our_jobs(jobs: Mapping[str, Any]) -> dict[str, str]:
    ours = {name: SAME_JOB.get(name, name) for name in jobs}
    others = [name for name, job in ours.items() if job not in JOBS]
    return ours if len(ours) > 1 else dict.fromkeys(others, "worker") or ours


class Target(str):
    """The text of `server.target`, which knows its server: a session is given nothing else of it."""

    server: Server


@checked_class()
class Server:
    """`mh.Server`: this process as one task of the cluster. Pass `server.target` to the session.

    Args:
        server_or_cluster_def: The cluster, as a `ClusterSpec`, a dict or pairs.
        job_name: The job of this process, by the name that the cluster has.
        task_index: Its index in the job.
        options: `protocol="grpc"`, `config=None` and `start=True`, as by default; others are refused by name.
    """

    def __init__(
        self, server_or_cluster_def: Any, job_name: str | None = None, task_index: int | None = None, **options: Any
    ) -> None:
        unused = {name: value for name, value in options.items() if UNUSED.get(name, _NONE) != value}
        refuse_unknown("Server", unused, ["server_or_cluster_def", "job_name", "task_index", *UNUSED])
        cluster = (
            server_or_cluster_def
            if isinstance(server_or_cluster_def, ClusterSpec)
            else ClusterSpec(server_or_cluster_def)
        )
        if job_name is None:
            if len(cluster.job_of) > 1:
                raise ClusterError(
                    f"The cluster has the jobs {', '.join(cluster.job_of)}: which is this?",
                    where="Server",
                    fix=[f'job_name="{one}"' for one in cluster.job_of],
                )
            [job_name] = cluster.job_of
        self.cluster_spec = cluster
        self.ours = mh.Server(
            cluster.in_our_names(), cluster.job_of.get(job_name, job_name), 0 if task_index is None else task_index
        )
        """The `mh.Server`, for a strategy's `cluster=`."""

    @staticmethod
    def create_local_server(*args: Any, **kwargs: Any) -> Server:
        """Refused: a program without a cluster needs no server."""
        raise NotHere(
            "create_local_server has no meaning here: one process needs no server.",
            where="Server.create_local_server",
            fix=["MonitoredTrainingSession(), without master="],
        )

    @property
    def target(self) -> Target:
        """The address of this task."""
        target = Target(self.ours.target)
        target.server = self
        return target

    def join(self) -> int:
        """Wait for the end of the run, as an evaluator does; a ps task is refused, with what it does instead."""
        if self.ours.task.job == "ps":
            raise NotHere(
                "A parameter server here applies the optimizer, so it needs the script's model and optimizer: a ps "
                "task runs the whole script, and serves from its session on.",
                where="Server.join",
                fix=[
                    'leave out: if job_name == "ps": server.join()',
                    "mh.Server(...).join(), under a mirrored strategy",
                ],
            )
        return self.ours.join()
