"""Clusters in TensorFlow's format: jobs, their tasks and addresses, and which task this process is.

`ClusterSpec` is a value; `from_tf_config` reads the JSON text of TF_CONFIG. Every invalid field raises an error that
names it and shows a valid one. No sockets, no environment: `spec.load` finds the text, `launcher.launcher` acts on it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from manyhands.errors import ClusterError
from manyhands.spec.addresses import EXAMPLE_ADDRESS, Address, parse_task_address, shown

__all__ = ["ClusterSpec", "ClusterTask", "from_tf_config"]

JOBS = ("chief", "worker", "ps", "evaluator")
MAX_BYTES = 2**20

EXAMPLE = (
    '{"cluster": {"chief": ["10.0.0.1:2222"], "worker": ["10.0.0.2:2222"]}, "task": {"type": "worker", "index": 0}}'
)
_CLUSTER_EXAMPLE = '"cluster": {"chief": ["10.0.0.1:2222"], "worker": ["10.0.0.2:2222", "10.0.0.3:2222"]}'
_TASK_EXAMPLE = '"task": {"type": "worker", "index": 0}'


class ClusterSpec:
    """Jobs and the addresses of their tasks: `ClusterSpec({"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]})`.

    Frozen and comparable.

    Args:
        cluster: A dict from job to its tasks: a list of addresses or, if only some are known, a dict from index to
            address. Or another `ClusterSpec`.
        where: Source of the cluster, for error messages.
    """

    def __init__(self, cluster: ClusterSpec | Mapping[str, Any], *, where: str | None = None) -> None:
        jobs: Any = cluster.as_dict() if isinstance(cluster, ClusterSpec) else cluster
        where = where or "ClusterSpec(...)"
        if not isinstance(jobs, Mapping):
            raise ClusterError(
                f'"cluster" is {_kind(jobs)}, but must map jobs to addresses.', where=where, fix=[_CLUSTER_EXAMPLE]
            )
        if not jobs:
            raise ClusterError('"cluster" is empty: it has no job.', where=where, fix=[_CLUSTER_EXAMPLE])
        self._jobs: dict[str, dict[int, str]] = {job: _tasks(job, tasks, where) for job, tasks in sorted(jobs.items())}
        _refuse_duplicates(self._jobs, where)
        _refuse_unusable_jobs(self._jobs, where)

    @property
    def jobs(self) -> list[str]:
        """Names of the jobs."""
        return list(self._jobs)

    def num_tasks(self, job: str) -> int:
        """How many tasks a job has.

        Args:
            job: Its name.
        """
        return len(self._of(job))

    def task_indices(self, job: str) -> list[int]:
        """Indices of a job's tasks, in order.

        Args:
            job: Its name.
        """
        return sorted(self._of(job))

    def task_address(self, job: str, index: int) -> str:
        """Where one task listens, as "host:port".

        Args:
            job: The job's name.
            index: The task's index.
        """
        tasks = self._of(job)
        if index not in tasks:
            have = ", ".join(map(str, sorted(tasks)))
            raise ClusterError(f'Job "{job}" has no task {index}; it has {have}.', fix=[f"an index of {have}"])
        return tasks[index]

    def job_tasks(self, job: str) -> list[str | None]:
        """Addresses by index; None for tasks that a sparse job does not list.

        Args:
            job: The job's name.
        """
        tasks = self._of(job)
        return [tasks.get(index) for index in range(max(tasks) + 1)]

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Lists for complete jobs, dicts for sparse ones; a ClusterSpec of the result equals this one."""
        complete = {job: sorted(tasks) == list(range(len(tasks))) for job, tasks in self._jobs.items()}
        return {
            job: [tasks[index] for index in sorted(tasks)] if complete[job] else dict(tasks)
            for job, tasks in self._jobs.items()
        }

    def _of(self, job: str) -> dict[int, str]:
        if job not in self._jobs:
            raise ClusterError(f'The cluster has no job "{job}"; it has {", ".join(self.jobs)}.', fix=self.jobs[:1])
        return self._jobs[job]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterSpec) and self._jobs == other._jobs

    def __hash__(self) -> int:
        return hash(json.dumps(self._jobs, sort_keys=True))

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"


def _tasks(job: Any, tasks: Any, where: str) -> dict[int, str]:
    if job not in JOBS:
        raise ClusterError(
            f'"cluster" has a job {shown(job)}; jobs are {", ".join(JOBS)}.', where=where, fix=[_CLUSTER_EXAMPLE]
        )
    field = f'"cluster"."{job}"'
    example = [f'"{job}": ["{EXAMPLE_ADDRESS}"]']
    if isinstance(tasks, Mapping):
        pairs = [(_sparse_index(index, field, where), address) for index, address in tasks.items()]
    elif isinstance(tasks, Sequence) and not isinstance(tasks, str | bytes):
        pairs = list(enumerate(tasks))
    else:
        raise ClusterError(f"{field} is {_kind(tasks)}, but must be a list of addresses.", where=where, fix=example)
    if not pairs:
        raise ClusterError(f"{field} is an empty list.", where=where, fix=example)
    for index, address in pairs:
        parse_task_address(address, f"{field}[{index}]", where)
    return dict(sorted(pairs))


def _sparse_index(index: Any, field: str, where: str) -> int:
    # JSON has no integer keys, so TF_CONFIG gives the index of a sparse job as text.
    if isinstance(index, str) and index.isascii() and index.isdigit():
        index = int(index[:9])
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise ClusterError(f"{field} has {shown(index)} for a task index.", where=where, fix=["an index from 0"])
    return index


def _refuse_duplicates(jobs: Mapping[str, Mapping[int, str]], where: str) -> None:
    seen: dict[Address, str] = {}
    for job, tasks in jobs.items():
        for index, address in tasks.items():
            name, parsed = f'"{job}"[{index}]', parse_task_address(address, job)
            if parsed in seen:
                what = f'"cluster": {seen[parsed]} and {name} have the same address {address}.'
                raise ClusterError(what, where=where, fix=["another port for one of them"])
            seen[parsed] = name


def _refuse_unusable_jobs(jobs: Mapping[str, Mapping[int, str]], where: str) -> None:
    for job in ("chief", "evaluator"):
        if len(jobs.get(job, {})) > 1:
            what = f'"cluster"."{job}" has {len(jobs[job])} addresses, but there is at most one {job}.'
            raise ClusterError(what, where=where, fix=[f'"{job}": ["{EXAMPLE_ADDRESS}"], the others as "worker"'])
    if not ("chief" in jobs or "worker" in jobs):
        what = f'"cluster" has neither a chief nor a worker, only {", ".join(jobs)}: no task would train.'
        raise ClusterError(what, where=where, fix=[_CLUSTER_EXAMPLE])


class ClusterTask:
    """The task of a cluster that this process is. The chief is the task of type chief, else worker 0."""

    def __init__(
        self, cluster: ClusterSpec | Mapping[str, Any], job: str, index: int, *, where: str | None = None
    ) -> None:
        self.cluster = cluster if isinstance(cluster, ClusterSpec) else ClusterSpec(cluster, where=where)
        self.job, self.index = job, index
        where = where or f"task {job} {index}"
        if not isinstance(job, str) or job not in JOBS:
            raise ClusterError(
                f'"task"."type" is {shown(job)}; types are {", ".join(JOBS)}.', where=where, fix=[_TASK_EXAMPLE]
            )
        # TensorFlow keeps the evaluator outside the cluster.
        if job not in self.cluster.jobs and job != "evaluator":
            have = ", ".join(self.cluster.jobs)
            raise ClusterError(
                f'"task"."type" is "{job}", but the cluster has only {have}.', where=where, fix=[_CLUSTER_EXAMPLE]
            )
        if not isinstance(index, int) or isinstance(index, bool):
            raise ClusterError(
                f'"task"."index" is {shown(index)}, but must be a whole number.', where=where, fix=[_TASK_EXAMPLE]
            )
        known = self.cluster.task_indices(job) if job in self.cluster.jobs else [0]
        if index not in known:
            have = ", ".join(map(str, known))
            raise ClusterError(
                f'"task"."index" is {index}, but job "{job}" has {have}.', where=where, fix=[_TASK_EXAMPLE]
            )

    @property
    def trainers(self) -> list[tuple[str, int]]:
        """The tasks that train under the mirrored strategies, chief first; the position is the host's number."""
        return [
            (job, index)
            for job in ("chief", "worker")
            if job in self.cluster.jobs
            for index in self.cluster.task_indices(job)
        ]

    @property
    def hosts(self) -> list[tuple[str, int]]:
        """The tasks of a run with parameter servers (chief, workers, ps), in the order of host numbers."""
        return [*self.trainers, *(("ps", index) for index in self.servers)]

    @property
    def servers(self) -> list[int]:
        """Indices of the ps tasks; the position is the server's number."""
        return self.cluster.task_indices("ps") if "ps" in self.cluster.jobs else []

    @property
    def is_chief(self) -> bool:
        return (self.job, self.index) == self.trainers[0]

    @property
    def trains(self) -> bool:
        return (self.job, self.index) in self.trainers

    @property
    def host_rank(self) -> int:
        return self.trainers.index((self.job, self.index))

    @property
    def address(self) -> Address | None:
        """Address of this task; None for an evaluator that the cluster does not list."""
        if self.job not in self.cluster.jobs:
            return None
        return parse_task_address(self.cluster.task_address(self.job, self.index), self.job)

    @property
    def chief_address(self) -> Address:
        job, index = self.trainers[0]
        return parse_task_address(self.cluster.task_address(job, index), job)

    def __eq__(self, other: object) -> bool:
        mine = (self.cluster, self.job, self.index)
        return isinstance(other, ClusterTask) and mine == (other.cluster, other.job, other.index)

    def __hash__(self) -> int:
        return hash((self.cluster, self.job, self.index))

    def __repr__(self) -> str:
        return f"ClusterTask({self.cluster.as_dict()!r}, {self.job!r}, {self.index!r})"


def from_tf_config(text: str) -> ClusterTask:
    """The task that the text of TF_CONFIG describes; unknown fields are ignored, as in TensorFlow."""
    where = "TF_CONFIG"
    if len(text) > MAX_BYTES:
        raise ClusterError(f"TF_CONFIG is {len(text)} characters long.", where=where, fix=[EXAMPLE])
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        at = f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        raise ClusterError(f"TF_CONFIG is not JSON{at}.", where=where, fix=[EXAMPLE]) from None
    if not isinstance(document, dict):
        raise ClusterError(f"TF_CONFIG is {_kind(document)}, but must be an object.", where=where, fix=[EXAMPLE])
    if "cluster" not in document:
        raise ClusterError('TF_CONFIG has no "cluster".', where=where, fix=[_CLUSTER_EXAMPLE])
    cluster = ClusterSpec(document["cluster"], where=where)
    task = document.get("task")
    if not isinstance(task, dict):
        what = 'TF_CONFIG has no "task".' if task is None else f'"task" is {_kind(task)}, but must be an object.'
        raise ClusterError(what, where=where, fix=[_TASK_EXAMPLE])
    for field in ("type", "index"):
        if field not in task:
            raise ClusterError(f'"task" has no "{field}".', where=where, fix=[_TASK_EXAMPLE])
    return ClusterTask(cluster, task["type"], task["index"], where=where)


def _kind(value: Any) -> str:
    words = {dict: "an object", list: "a list", str: "text", int: "a number", float: "a number", bool: "true or false"}
    return words.get(type(value), "null" if value is None else f"a {type(value).__name__}")
