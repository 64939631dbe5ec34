"""The sides that take turns, as commands: our workers, DDP's ranks, loops by hand, and libraries in their environments.

All have one thread per rank, and the glibc settings of `mh run`, unless a side runs as shipped.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.driver.baton import Process, Side
from bench.driver.child import ROOT
from bench.results.table import OURS
from manyhands.launcher.launch import ALLOCATOR

__all__ = [
    "MH",
    "dtensor",
    "library",
    "library_python",
    "library_servers",
    "one_process",
    "pipelining",
    "plain_environment",
    "ranks",
    "served",
    "torch_side",
    "trainer",
]

MH = (sys.executable, "-m", "manyhands.cli.main")
VENVS = ROOT / ".bench-venvs"


def plain_environment(*, allocator: bool = True) -> dict[str, str]:
    """This process's environment, without variables that would configure a peer."""
    ours = ("MALLOC_", "GLIBC_", "MANYHANDS_", "OMP_", "MKL_", "TF_", "PYTHONPATH")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(ours)}
    return kept | {"OMP_NUM_THREADS": "1"} | (ALLOCATOR if allocator else {})


def trainer(
    workload: str,
    workers: int,
    *,
    name: str = OURS,
    strategy: str = "mirrored",
    flags: tuple[str, ...] = (),
    think_s: float = 0.0,
) -> Side:
    """`mh run` as a user types it; it sets threads and allocator itself. Every slice takes `think_s` longer."""

    def processes(folder: str) -> list[Process]:
        run = ("run", "-n", str(workers), "--threads", "1", "--ui", "none", "--run-dir", f"{folder}/run", *flags)
        script = ("-m", "bench.programs.trainer_side", workload, strategy, str(workers), str(think_s))
        return [Process([*MH, *run, *script], plain_environment(allocator=False))]

    return Side(name, workers, processes)


def served(script: Sequence[str], workers: int, *, name: str = OURS) -> Side:
    """`mh run` with one parameter server; the script chooses the model and the mode."""

    def processes(folder: str) -> list[Process]:
        run = ("run", "-n", str(workers), "--servers", "1", "--threads", "1", "--ui", "none")
        more = ("--run-dir", f"{folder}/run", "-m", *script)
        return [Process([*MH, *run, *more], plain_environment(allocator=False))]

    return Side(name, workers, processes)


def one_process(name: str, script: Sequence[str]) -> Side:
    """A script of ours that takes turns without `mh run`."""
    command = (sys.executable, "-m", *script)
    return Side(name, 1, lambda _: [Process(command, {**plain_environment(), "RANK": "0"})])


def torch_side(
    name: str, kind: str, workload: str, workers: int, *, allocator: bool = True, rows: int | None = None
) -> Side:
    """`kind` is "ddp", "fsdp" or "alone", see `torch_side`."""
    command = (
        sys.executable,
        "-m",
        "bench.programs.torch_side",
        kind,
        workload,
        *(() if rows is None else (str(rows),)),
    )
    environment = plain_environment(allocator=allocator)
    return Side(name, workers, lambda _: ranks(command, environment, workers))


def dtensor(name: str, workload: str, workers: int) -> Side:
    """See `dtensor_side`."""
    command = (sys.executable, "-m", "bench.layouts.dtensor_side", workload)
    return Side(name, workers, lambda _: ranks(command, plain_environment(), workers))


def pipelining(name: str, schedule: str, workload: str, workers: int) -> Side:
    """A pipeline by hand, see `pipelining_side`."""
    command = (sys.executable, "-m", "bench.layouts.pipelining_side", schedule, workload)
    return Side(name, workers, lambda _: ranks(command, plain_environment(), workers))


def library(name: str, peer: str, workload: str, workers: int) -> Side:
    """`peer` in its own environment, if that exists."""
    command = (str(library_python(peer)), "-m", f"bench.peers.{peer}_side", workload)

    def processes(folder: str) -> list[Process]:
        if peer == "tensorflow":
            return [Process(command, plain_environment() | variables) for variables in _tensorflow_variables(workers)]
        return ranks(command, plain_environment(), workers)

    return Side(name, workers, processes)


def library_servers(name: str, peer: str, script: Sequence[str]) -> Side:
    """`peer` with a parameter server: its script starts the server and workers, and takes turns for all of them."""
    command = (str(library_python(peer)), "-m", *script)
    return Side(name, 1, lambda _: [Process(command, {**plain_environment(), "RANK": "0"})])


def library_python(peer: str) -> Path:
    return VENVS / peer / "bin" / "python"


def ranks(command: Sequence[str], environment: Mapping[str, str], workers: int) -> list[Process]:
    """One process per rank on this machine, with the environment variables of torchrun."""
    port = str(_free_ports(1)[0])
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(workers)}
    rendezvous |= {"LOCAL_WORLD_SIZE": str(workers), "NODE_RANK": "0", "GROUP_RANK": "0"}
    return [
        Process(command, {**environment, **rendezvous, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(workers)
    ]


def _tensorflow_variables(workers: int) -> list[dict[str, str]]:
    cluster = {"worker": [f"127.0.0.1:{port}" for port in _free_ports(workers)]}
    config = [{"cluster": cluster, "task": {"type": "worker", "index": rank}} for rank in range(workers)]
    return [{"TF_CONFIG": json.dumps(task), "RANK": str(rank)} for rank, task in enumerate(config)]


def _free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports
