"""Two workers that partition a model, compared with the same by hand with torch's own tools, on Gloo."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bench.driver.baton import Side, interleave
from bench.driver.sides import dtensor, pipelining, torch_side, trainer
from bench.programs.workloads import WORKLOADS
from bench.results.compare import Measured, Size, divide

__all__ = ["pipeline", "sharded", "tensor"]

WORKERS = 2
BLOCKS = "blocks"
"""The workload of the pipeline benchmark."""


def sharded(workload: str, size: Size) -> Measured:
    """Each worker has a shard of the parameters; torch's side uses `fully_shard`."""
    by_hand = partial(torch_side, kind="fsdp", workload=workload, workers=WORKERS)
    return _measure("sharded", workload, "fully_shard", by_hand, size)


def tensor(workload: str, size: Size) -> Measured:
    """Each worker has a shard of every layer."""
    return _measure("tensor", workload, "DTensor", partial(dtensor, workload=workload, workers=WORKERS), size)


def pipeline(schedule: str, size: Size) -> Measured:
    """Each worker has half of the layers; torch's side uses `torch.distributed.pipelining`."""
    by_hand = partial(pipelining, schedule=schedule, workload=BLOCKS, workers=WORKERS)
    return _measure(f"pipeline {schedule}", BLOCKS, "pipelining", by_hand, size)


def _measure(strategy: str, workload: str, peer: str, by_hand: Callable[[str], Side], size: Size) -> Measured:
    sides = [trainer(workload, WORKERS, strategy=strategy), by_hand(peer), by_hand(f"{peer} again")]
    found = [interleave(sides, blocks, size.block_s) for blocks in divide(size)]
    settings = {"model": WORKLOADS[workload].model, "batch": WORKLOADS[workload].batch * WORKERS, "workers": WORKERS}
    last = found[-1][1]
    extra = {"threads": last["of_sides"][sides[0].name]["threads"], "of_sides": last["of_sides"]}
    return Measured(
        [seconds for seconds, _ in found], {**settings, **extra, "steps_per_block": last["steps_per_block"]}
    )
