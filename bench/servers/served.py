"""Parameter servers on one host: against loops that exchange nothing, other libraries' servers, and our own modes.

A step is one batch per worker on every side, however it is applied: two updates of two workers in async, one of both in
sync. So the ratio of two sides' seconds is that of their examples per second.
"""

from __future__ import annotations

from typing import Any

from bench.driver.baton import Side, interleave
from bench.driver.sides import library_python, library_servers, one_process, served, torch_side
from bench.programs.workloads import SERVED_ROWS, SPARSE_BATCH, SPARSE_DIM, SPARSE_IDS, WORKLOADS
from bench.recovery.recovery import FULL_BLOCKS, WORKERS
from bench.recovery.recovery_script import MODEL
from bench.results.compare import Measured, Size, divide
from bench.results.table import OURS
from bench.servers.push_side import NUM_BYTES
from bench.servers.served_kills import kills
from bench.servers.served_side import THINK_S

__all__ = ["measure", "why_not"]

# Workers do not end a block at the same time; in longer blocks the difference matters less.
LONGER_BLOCKS = 3
LIBRARIES = {
    "tensorflow": ("TensorFlow", "tensorflow", ("bench.peers.tensorflow_ps_side",)),
    "ray": ("Ray as documented", "ray", ("bench.peers.ray_side", "documented")),
    "ray-lean": ("Ray without copies", "ray", ("bench.peers.ray_side", "lean")),
}
"""A peer's name, the environment that it needs, and the module and arguments that run there."""
SPARSE_PEERS = {"sparse-tensorflow": "TensorFlow", "sparse-torch": "nn.Embedding"}
KILLS = 20
PACED = "mlp-1m"
"""Its computation is short compared with the time that its slices sleep."""


def why_not(workload: str) -> str | None:
    peer = workload.removesuffix("-16").removeprefix("sparse-")
    if peer not in LIBRARIES:
        return None
    name, environment, _ = LIBRARIES[peer]
    is_there = (library_python(environment).parent.parent / "installed").exists()
    return None if is_there else f"no environment for {name}; `make bench` makes it"


def measure(workload: str, size: Size) -> Measured:
    match workload:
        case "one-slow":
            return _paced(workload, "async", 2, size)
        case "often-slow":
            return _paced(workload, "ssp", 4, size)
        case "push-pull":
            return _push_pull(size)
        case "kills":
            return _kills(size)
        case "sparse-tensorflow" | "sparse-torch":
            return _sparse(workload, size)
    model = "mlp-10m-16" if workload.endswith("-16") else "mlp-10m"
    peer = workload.removesuffix("-16")
    name = "two loops by hand" if peer == "loops" else LIBRARIES[peer][0]
    sides = [
        served(("bench.servers.served_side", model, "async", "steady"), 2),
        *(_side(peer, one, model) for one in (name, f"{name} again")),
    ]
    return _measured(sides, _trained(model, 2), size)


def _side(peer: str, name: str, model: str) -> Side:
    if peer == "loops":
        return torch_side(name, "alone", model, 2, rows=SERVED_ROWS)
    _, environment, script = LIBRARIES[peer]
    return library_servers(name, environment, (*script, model, "2"))


def _paced(pace: str, mode: str, workers: int, size: Size) -> Measured:
    """A mode in which workers do not wait for all, or not at once, against the one in which they do."""
    names = {OURS: mode, "sync": "sync", "sync again": "sync"}
    sides = [served(("bench.servers.served_side", PACED, of, pace), workers, name=name) for name, of in names.items()]
    return _measured(sides, {**_trained(PACED, workers), "think_s": THINK_S}, size)


def _push_pull(size: Size) -> Measured:
    peers = ("two copies", "two copies again")
    sides = [
        served(("bench.servers.push_side", "served"), 1),
        *(one_process(n, ("bench.servers.push_side", "copies")) for n in peers),
    ]
    return _measured(sides, {"bytes": NUM_BYTES, "workers": 1}, size)


def _sparse(peer: str, size: Size) -> Measured:
    script = ("bench.peers.tensorflow_rows_side", "2")
    sides = [served(("bench.servers.sparse_side", "served"), 2)]
    for name in (SPARSE_PEERS[peer], f"{SPARSE_PEERS[peer]} again"):
        is_torch = peer == "sparse-torch"
        sides.append(
            one_process(name, ("bench.servers.sparse_side", "torch"))
            if is_torch
            else library_servers(name, "tensorflow", script)
        )
    return _measured(sides, {"batch": 2 * SPARSE_BATCH, "ids": SPARSE_IDS, "dim": SPARSE_DIM, "workers": 2}, size)


def _kills(size: Size) -> Measured:
    num_kills = max(1, round(KILLS * size.num_blocks / FULL_BLOCKS))
    settings = {"model": WORKLOADS[MODEL].model, "workers": WORKERS, "servers": 1, "threads": 1}
    return Measured([{OURS: kills(num_kills)}], settings)


def _trained(model: str, workers: int) -> dict[str, Any]:
    return {"model": WORKLOADS[model].model, "batch": WORKLOADS[model].batch * workers, "workers": workers}


def _measured(sides: list[Side], settings: dict[str, Any], size: Size) -> Measured:
    found = [interleave(sides, blocks, LONGER_BLOCKS * size.block_s) for blocks in divide(size)]
    return Measured([seconds for seconds, _ in found], {**settings, "servers": 1, "threads": 1, **found[-1][1]})
