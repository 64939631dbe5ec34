"""What a placer told one process: which task of which job it is, and who the others are.

A placer puts our agents on hosts: Slurm, MPI, Ray, Kubernetes, ssh. Plain data; `launcher.placers.seats` reads it from
the environment, `spec.placement.from_seat` turns it into a placement.
"""

from __future__ import annotations

import msgspec

__all__ = ["Seat"]


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    placer: str
    """slurm, mpi, ..."""
    command: str
    """What starts one task per host under it: srun, mpirun, ..."""
    variable: str
    """The environment variable, with its value, that says how many tasks there are."""
    num_tasks: int
    task: int
    job: str = ""
    """The job's number, for people."""
    meeting: str = ""
    """A name that all tasks of this start of the job know, and no other start of it; empty: there is none."""
    num_hosts: int | None = None
    """None: the environment does not say."""
    host_rank: int | None = None
    """This host among them. None: the environment does not say."""
    most_tasks_of_a_host: int | None = None
    node: str = ""
    """The placer's name of this host."""
    nodes: list[str] = []
    """Of all hosts, by rank; empty if the environment does not name them."""
    components: int = 1
    """Above 1: parts of a heterogeneous Slurm job, each with numbers of its own."""
    starts: int = 0
    """How often the job was started before: requeued after a time limit, a preemption or a lost host."""
