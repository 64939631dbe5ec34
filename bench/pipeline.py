"""Two workers with a half of the layers each, against the same by hand with torch.distributed.pipelining on Gloo."""

from __future__ import annotations

from bench.baton import interleave
from bench.compare import Measured, Size, divide
from bench.sides import pipelining, trainer
from bench.workloads import WORKLOADS

__all__ = ["measure"]

WORKERS, MODEL = 2, "blocks"
PEER = "pipelining"


def measure(schedule: str, size: Size) -> Measured:
    sides = [
        trainer(MODEL, WORKERS, strategy=f"pipeline {schedule}"),
        *(pipelining(name, schedule, MODEL, WORKERS) for name in (PEER, f"{PEER} again")),
    ]
    found = [interleave(sides, blocks, size.block_s) for blocks in divide(size)]
    settings = {"model": WORKLOADS[MODEL].model, "batch": WORKLOADS[MODEL].batch * WORKERS, "workers": WORKERS}
    last = found[-1][1]
    told = {"threads": last["of_sides"][sides[0].name]["threads"], "of_sides": last["of_sides"]}
    return Measured([seconds for seconds, _ in found], {**settings, **told, "steps_per_block": last["steps_per_block"]})
