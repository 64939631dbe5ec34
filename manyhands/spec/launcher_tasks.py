"""Reads from the environment which task of a Slurm or MPI job this process is.

`srun -N2 mh run train.py` runs `mh run` in every task. Without flags that say how the tasks find each other, each task
would train the whole model independently. Pure: the environment is passed in as a mapping. Start reading at
`engine_task`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from manyhands.errors import UsageError

__all__ = ["EngineTask", "engine_task", "refuse_one_run_per_task"]


class EngineTask(NamedTuple):
    engine: str
    """The command that started it: "srun", "mpirun", ..."""
    rank: int
    size: int
    """Number of tasks; with PMIx a lower bound."""
    hosts: int | None
    """Number of hosts that the tasks run on; None if the environment does not say."""
    variable: str
    """The environment variable, with its value, that gives the number of tasks."""


# Command; variables for the number of tasks, this task's rank, and the number of tasks on this host.
_MPI = (
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("mpirun", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
    ("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
    ("flux run", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", ""),
)


def engine_task(environ: Mapping[str, str]) -> EngineTask | None:
    """This process's task in a job of several; None if it is the only task or no such launcher started it."""
    found = [_slurm(environ), *(_mpi(environ, *names) for names in _MPI), _pmix(environ)]
    return next((task for task in found if task is not None and task.size > 1), None)


def _slurm(environ: Mapping[str, str]) -> EngineTask | None:
    # A batch script has SLURM_NTASKS and SLURM_PROCID as well, though it runs once: only srun's tasks are in a step.
    if "SLURM_STEP_ID" not in environ:
        return None
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    hosts = _number(environ, "SLURM_STEP_NUM_NODES") or _number(environ, "SLURM_NNODES")
    return _task("srun", environ, name, "SLURM_PROCID", hosts)


def _mpi(environ: Mapping[str, str], engine: str, size: str, rank: str, local_size: str) -> EngineTask | None:
    tasks, per_host = _number(environ, size), _number(environ, local_size)
    return _task(engine, environ, size, rank, -(-tasks // per_host) if tasks and per_host else None)


def _task(engine: str, environ: Mapping[str, str], size: str, rank: str, hosts: int | None) -> EngineTask | None:
    tasks = _number(environ, size)
    return EngineTask(engine, _number(environ, rank) or 0, tasks, hosts, f"{size}={tasks}") if tasks else None


def _pmix(environ: Mapping[str, str]) -> EngineTask | None:
    """PMIx has no variable for the number of tasks; a rank above 0 implies several."""
    rank = _number(environ, "PMIX_RANK")
    return EngineTask("the MPI launcher", rank, rank + 1, None, f"PMIX_RANK={rank}") if rank else None


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def refuse_one_run_per_task(task: EngineTask | None) -> None:
    """Raise if this process is one of several tasks, each of which would start a separate run."""
    if task is None:
        return
    raise UsageError(
        f"{task.engine} started this command in {task.size} tasks; each would train the whole model independently.",
        where=f"{task.variable} in the environment, and no flag that says how the tasks find each other",
        fix=[*_fix(task), "mh run --standalone ..., if each task is to train a separate model"],
    )


def _fix(task: EngineTask) -> list[str]:
    num_hosts = "N" if task.hosts is None else str(task.hosts)
    one_per_host, single_task = {
        "srun": (f"srun -N{num_hosts} --ntasks-per-node=1 --exclusive", "srun -n1 --exclusive"),
        "mpirun": (f"mpirun -np {num_hosts} --map-by node --bind-to none", "mpirun -np 1 --bind-to none"),
    }.get(task.engine, (f"{task.engine}, one task per host:", f"{task.engine}, one task:"))
    on_one_host = f"{single_task} mh run -n {task.size} ..., for {task.size} workers on one host"
    on_several = (
        f"{one_per_host} mh run --nnodes={num_hosts} --rdzv-backend=c10d --rdzv-endpoint=FIRST_HOST:29500 "
        "--insecure-data-plane ..., with MANYHANDS_KEY_FILE (mh keygen), for one run on all hosts"
    )
    if task.hosts == 1:
        return [on_one_host]
    return [on_several, "mh agent --join FILE in further tasks, with the join file of one mh run", on_one_host]
