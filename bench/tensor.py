"""Two workers with a part of every layer each, against the same by hand with torch's DTensor on Gloo."""

from __future__ import annotations

from bench.baton import interleave
from bench.compare import Measured, Size, divide
from bench.sides import dtensor, trainer
from bench.workloads import WORKLOADS

__all__ = ["measure"]

WORKERS = 2
PEER = "DTensor"


def measure(workload: str, size: Size) -> Measured:
    sides = [
        trainer(workload, WORKERS, strategy="tensor"),
        *(dtensor(name, workload, WORKERS) for name in (PEER, f"{PEER} again")),
    ]
    found = [interleave(sides, blocks, size.block_s) for blocks in divide(size)]
    settings = {"model": WORKLOADS[workload].model, "batch": WORKLOADS[workload].batch * WORKERS, "workers": WORKERS}
    last = found[-1][1]
    told = {"threads": last["of_sides"][sides[0].name]["threads"], "of_sides": last["of_sides"]}
    return Measured([seconds for seconds, _ in found], {**settings, **told, "steps_per_block": last["steps_per_block"]})
