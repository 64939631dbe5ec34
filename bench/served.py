"""Parameter servers on one host: against loops that exchange nothing, others' servers, and our own modes.

A step is one batch per worker on every side, whoever applies it when: two updates of two workers in async, one of both
in sync. So the ratio of two sides' seconds is that of their examples per second.
"""

from __future__ import annotations

from bench.baton import Side, interleave
from bench.compare import Measured, Size, divide
from bench.push_side import NUM_BYTES
from bench.recovery import FULL_BLOCKS, WORKERS
from bench.recovery_script import MODEL
from bench.served_kills import kills
from bench.served_side import THINK_S
from bench.sides import copying, library_python, library_servers, pushing, served, torch_side
from bench.table import OURS
from bench.workloads import SERVED_ROWS, WORKLOADS

__all__ = ["measure", "why_not"]

# Workers do not end a block together; in longer blocks that is a smaller part.
LONGER_BLOCKS = 3
LIBRARIES = {
    "tensorflow": ("TensorFlow", "tensorflow", ("bench.peers.tensorflow_ps_side",)),
    "ray": ("Ray as documented", "ray", ("bench.peers.ray_side", "documented")),
    "ray-lean": ("Ray without copies", "ray", ("bench.peers.ray_side", "lean")),
}
"""What a peer is called, whose environment it needs, and what runs there."""
KILLS = 10
PACED = "mlp-1m"
"""Small beside the time that its slices sleep."""


def why_not(workload: str) -> str | None:
    peer = workload.removesuffix("-16")
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
    model = "mlp-10m-16" if workload.endswith("-16") else "mlp-10m"
    peer = workload.removesuffix("-16")
    name = "two loops by hand" if peer == "loops" else LIBRARIES[peer][0]
    sides = [served(model, "async", 2), *(_side(peer, one, model) for one in (name, f"{name} again"))]
    return _measured(sides, model, 2, size)


def _side(peer: str, name: str, model: str) -> Side:
    if peer == "loops":
        return torch_side(name, "alone", model, 2, rows=SERVED_ROWS)
    _, environment, script = LIBRARIES[peer]
    return library_servers(name, environment, (*script, model, "2"))


def _paced(pace: str, mode: str, workers: int, size: Size) -> Measured:
    """A mode that waits for nobody, or not at once, against the one that waits for all."""
    names = {OURS: mode, "sync": "sync", "sync again": "sync"}
    sides = [served(PACED, of, workers, name=name, pace=pace) for name, of in names.items()]
    found = _measured(sides, PACED, workers, size)
    return found._replace(settings={**found.settings, "think_s": THINK_S})


def _push_pull(size: Size) -> Measured:
    peers = ("two copies", "two copies again")
    sides = [pushing(), *(copying(name) for name in peers)]
    found = [interleave(sides, blocks, size.block_s) for blocks in divide(size)]
    settings = {"bytes": NUM_BYTES, "workers": 1, "servers": 1, "threads": 1, **found[-1][1]}
    return Measured([seconds for seconds, _ in found], settings)


def _kills(size: Size) -> Measured:
    num_kills = max(1, round(KILLS * size.num_blocks / FULL_BLOCKS))
    settings = {"model": WORKLOADS[MODEL].model, "workers": WORKERS, "servers": 1, "threads": 1}
    return Measured([{OURS: kills(num_kills)}], settings)


def _measured(sides: list[Side], model: str, workers: int, size: Size) -> Measured:
    found = [interleave(sides, blocks, LONGER_BLOCKS * size.block_s) for blocks in divide(size)]
    batch = WORKLOADS[model].batch * workers
    settings = {"model": WORKLOADS[model].model, "batch": batch, "workers": workers, "servers": 1, "threads": 1}
    return Measured([seconds for seconds, _ in found], {**settings, **found[-1][1]})
