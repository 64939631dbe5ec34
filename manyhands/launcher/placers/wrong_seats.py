"""What is wrong with how a placer started this process, with what to type instead. Pure. Start at `check_seat`."""

from __future__ import annotations

from collections.abc import Mapping

from manyhands.errors import UsageError
from manyhands.launcher.placers.seats import only_task
from manyhands.spec.seat import Seat

__all__ = ["check_one_host", "check_seat", "notes_on"]


def check_seat(seat: Seat | None, environ: Mapping[str, str]) -> None:
    """Raise if the tasks of this job cannot become the hosts of one run; each would train a separate model."""
    if seat is None or only_task(seat):
        return
    alone = "mh run --standalone ..., if each task is to train a separate model"
    if environ.get("MANYHANDS_AGENT"):
        raise UsageError(
            f"{seat.command} was called by a worker of a run, and its {seat.num_tasks} tasks have that worker's place.",
            where="MANYHANDS_AGENT in the environment",
            fix=[f"env -u MANYHANDS_AGENT {seat.command} ..., outside of the script that trains"],
        )
    if seat.components > 1:
        raise UsageError(
            f"This Slurm job is heterogeneous: its {seat.components} components number their nodes separately.",
            where=f"SLURM_HET_SIZE={seat.components}",
            fix=[*_by_hand(seat), alone],
        )
    if (seat.most_tasks_of_a_host or 1) > 1:
        raise UsageError(_crowded(seat), where=f"{seat.variable} in the environment", fix=[*_one_per_host(seat), alone])
    if not seat.meeting or seat.num_hosts is None or seat.host_rank is None:
        raise UsageError(
            f"{seat.command} started this command in {seat.num_tasks} tasks; each would train the whole model "
            "independently, and they have no name in common by which to find each other.",
            where=f"{seat.variable} in the environment",
            fix=[*_by_hand(seat), f"{_single(seat)} mh run -n {seat.num_tasks} ..., for workers of one host", alone],
        )


def check_one_host(seat: Seat, nodes: str | None) -> None:
    """Raise if torchrun's flags say that there is one host, and the placer has started tasks on several."""
    if nodes is None:
        return
    raise UsageError(
        f"--nnodes is {nodes}, but {seat.command} has started {seat.num_tasks} tasks; each would train the model.",
        where=f"{seat.variable} in the environment",
        fix=["no --nnodes", "mh run --standalone ..., if each task is to train a separate model"],
    )


def _crowded(seat: Seat) -> str:
    where = f" on {seat.node}" if seat.node else " on one host"
    return (
        f"{seat.most_tasks_of_a_host} tasks of this {seat.command} are{where}, but one agent starts all workers of it."
    )


def _one_per_host(seat: Seat) -> list[str]:
    hosts = seat.num_hosts or 1
    workers = seat.most_tasks_of_a_host or 1
    if hosts == 1:
        return [f"{_single(seat)} mh run -n {workers} ..."]
    return [f"{_per_host(seat, hosts)} mh run -n {workers} ..."]


def _per_host(seat: Seat, hosts: int | str) -> str:
    return {
        "srun": f"srun -N{hosts} --ntasks-per-node=1 --exclusive",
        "mpirun": f"mpirun -np {hosts} --map-by node --bind-to none",
    }.get(seat.command, f"{seat.command}, one task per host:")


def _single(seat: Seat) -> str:
    alone = {"srun": "srun -n1 --exclusive", "mpirun": "mpirun -np 1 --bind-to none"}
    return alone.get(seat.command, f"{seat.command}, one task:")


def _by_hand(seat: Seat) -> list[str]:
    hosts = str(seat.num_hosts or "N")
    return [
        f"{_per_host(seat, hosts)} mh run --nnodes={hosts} --rdzv-backend=c10d --rdzv-endpoint=FIRST_HOST:29500 "
        "--insecure-data-plane ..., with MANYHANDS_KEY_FILE (mh keygen)",
        "mh agent --join FILE in further tasks, with the join file of one mh run",
    ]


def notes_on(seat: Seat | None, environ: Mapping[str, str], cores: int, cores_of_host: int) -> list[str]:
    """What a placer set that makes a run slow, one line each."""
    notes = []
    if seat is not None and cores <= 2 and 2 * cores <= cores_of_host:
        more = {
            "srun": f"srun --exclusive, or -c {cores_of_host}",
            "mpirun": "mpirun --map-by node --bind-to none",
        }.get(seat.command, "more cores per task")
        notes.append(f"this {seat.command} task has {cores} of the {cores_of_host} cores of its host. try: {more}")
    if environ.get("OMP_NUM_THREADS") == "1" and any(name in environ for name in ("RAY_JOB_ID", "RAY_RAYLET_PID")):
        notes.append("Ray has set OMP_NUM_THREADS=1: each worker computes with one thread. try: --threads N")
    return notes
