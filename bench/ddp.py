"""Two workers: `mh run -n 2` against DistributedDataParallel on Gloo, in the same two processes."""

from __future__ import annotations

from typing import Any

from bench.child import run_script
from bench.compare import Measured, Size, divide
from bench.sides import MH
from bench.workloads import WORKLOADS

__all__ = ["measure"]

WORKERS = 2


def measure(workload: str, size: Size) -> Measured:
    found = [_launch(workload, blocks, size.block_s) for blocks in divide(size)]
    settings = {
        "model": WORKLOADS[workload].model,
        "batch": WORKLOADS[workload].batch * WORKERS,
        "workers": WORKERS,
        "threads": found[0]["threads"],
        "steps_per_block": [launch["steps"] for launch in found],
    }
    return Measured([launch["seconds"] for launch in found], settings)


def _launch(workload: str, num_blocks: int, block_s: float) -> dict[str, Any]:
    def command(folder: str) -> list[str]:
        return [
            *(*MH, "run", "-n", str(WORKERS), "--threads", "1", "--ui", "none"),
            *("--run-dir", f"{folder}/run", "-m", "bench.ddp_script", workload),
            *("--blocks", str(num_blocks), "--block-s", str(block_s), "--meet-at", f"{folder}/meet"),
        ]

    return run_script(command)
