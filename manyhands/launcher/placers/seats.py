"""Reads from the environment which task of a Slurm or MPI job this process is. Pure.

`srun -N2 mh run train.py` and `mpirun -np 2 mh run train.py` run `mh run` in every task. The seat says how many there
are; with it, the tasks become the hosts of one run, instead of training the model once each. Kubeflow's variables
(`PET_*`) need no seat: they are torchrun's flags. Start reading at `find_seat`; `wrong_seats` says what cannot work.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import NamedTuple

from manyhands.errors import SpecError
from manyhands.launcher.placers.node_list import expand_counts, expand_names
from manyhands.spec.load import PLACER_VARIABLE
from manyhands.spec.seat import Seat

__all__ = ["find_seat", "only_task", "placers_are_off"]


class _MpiNames(NamedTuple):
    """Variables of one MPI: the number of tasks, this task's rank, and the number of tasks on this host."""

    placer: str
    command: str
    size: str
    rank: str
    local_size: str


_MPI = (
    _MpiNames("mpi", "mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    _MpiNames("mvapich", "mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    _MpiNames("mpich", "mpirun", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
    _MpiNames("jsrun", "jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
    _MpiNames("flux", "flux run", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", ""),
)


def find_seat(environ: Mapping[str, str]) -> Seat | None:
    """What a placer told this process; None if none did, or MANYHANDS_PLACER=none.

    MPI before Slurm: mpirun starts its own processes with srun, and their variables are inherited.
    """
    if placers_are_off(environ):
        return None
    found = [*(_mpi(environ, names) for names in _MPI), _slurm(environ), _pmix(environ)]
    seats = [seat for seat in found if seat is not None]
    return next((seat for seat in seats if not only_task(seat)), seats[0] if seats else None)


def placers_are_off(environ: Mapping[str, str]) -> bool:
    return environ.get(PLACER_VARIABLE, "").lower() == "none"


def only_task(seat: Seat | None) -> bool:
    """Whether this process has no others to find: it is a run of one host as any other."""
    return seat is None or seat.num_tasks == 1


def _slurm(environ: Mapping[str, str]) -> Seat | None:
    # A batch script has SLURM_NTASKS and SLURM_PROCID as well, though it runs once: only srun's tasks are in a step.
    if "SLURM_STEP_ID" not in environ:
        return None
    variable = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    if not (tasks := _number(environ, variable)):
        return None
    job, step = environ.get("SLURM_JOB_ID", ""), environ["SLURM_STEP_ID"]
    starts = _number(environ, "SLURM_RESTART_COUNT") or 0
    # srun's port: without it, a job number that Slurm uses again after its state was lost would be the same name.
    port = environ.get("SLURM_SRUN_COMM_PORT") or environ.get("SLURM_STEP_LAUNCHER_PORT", "")
    cluster = environ.get("SLURM_CLUSTER_NAME", "")
    return Seat(
        placer="slurm",
        command="srun",
        variable=f"{variable}={tasks}",
        num_tasks=tasks,
        task=_number(environ, "SLURM_PROCID") or 0,
        job=job,
        meeting=_file_name("slurm", cluster, f"{job}.{step}", f"start{starts + 1}", port) if job else "",
        num_hosts=_number(environ, "SLURM_STEP_NUM_NODES") or _number(environ, "SLURM_NNODES"),
        host_rank=_number(environ, "SLURM_NODEID"),
        most_tasks_of_a_host=max(expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", "")), default=None),
        node=environ.get("SLURMD_NODENAME", ""),
        nodes=_nodes(environ.get("SLURM_STEP_NODELIST", "")),
        components=_number(environ, "SLURM_HET_SIZE") or 1,
        starts=starts,
    )


def _nodes(expression: str) -> list[str]:
    try:
        return expand_names(expression) if expression else []
    except SpecError:
        return []  # a form that we do not know: the hosts find each other without the names


def _mpi(environ: Mapping[str, str], names: _MpiNames) -> Seat | None:
    tasks, here = _number(environ, names.size), _number(environ, names.local_size)
    if not tasks:
        return None
    rank = _number(environ, names.rank) or 0
    return Seat(
        placer=names.placer,
        command=names.command,
        variable=f"{names.size}={tasks}",
        num_tasks=tasks,
        task=rank,
        meeting=_of_mpirun(environ) if names.placer == "mpi" else "",
        num_hosts=-(-tasks // here) if here else None,
        host_rank=rank if here == 1 else None,
        most_tasks_of_a_host=here,
        node=environ.get("PMIX_HOSTNAME", ""),
    )


def _of_mpirun(environ: Mapping[str, str]) -> str:
    """A name for this start of mpirun. Its namespace may be used again; mpirun's own address, with it, is not."""
    if not (space := environ.get("PMIX_NAMESPACE", "")):
        return ""
    address = environ.get("OMPI_MCA_orte_hnp_uri", "") + environ.get("PMIX_ID", "").rpartition(".")[0]
    return _file_name("mpi", space, hashlib.sha256(address.encode()).hexdigest()[:16])


def _pmix(environ: Mapping[str, str]) -> Seat | None:
    """PMIx has no variable for the number of tasks; a rank above 0 implies several."""
    if not (rank := _number(environ, "PMIX_RANK")):
        return None
    return Seat(placer="pmix", command="the MPI launcher", variable=f"PMIX_RANK={rank}", num_tasks=rank + 1, task=rank)


def _file_name(*parts: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", "-".join(part for part in parts if part))[:200]


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
