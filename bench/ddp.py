"""Two workers: `mh run -n 2` against DistributedDataParallel on Gloo, in the same two processes."""

from __future__ import annotations

import sys
from typing import Any

from bench.child import run_script
from bench.compare import compare, divide
from bench.interleave import OURS
from bench.workloads import DDP

__all__ = ["ALLOWED", "TITLE", "measure"]

TITLE = "Two workers: mirrored against DistributedDataParallel on Gloo"
ALLOWED = 0.0


def measure(workload: str, *, num_blocks: int, block_s: float, launches: int, workers: int = 2) -> dict[str, Any]:
    found = [_launch(workload, blocks, block_s, workers) for blocks in divide(num_blocks, launches)]
    result = compare([launch["seconds"] for launch in found], OURS, "DDP", "DDP again", ALLOWED)
    settings = {
        "batch": DDP[workload].batch * workers,
        "workers": workers,
        "threads": found[0]["threads"],
        "steps_per_block": [launch["steps"] for launch in found],
    }
    return {"bench": "ddp", "workload": workload, "model": DDP[workload].model, **settings, **result}


def _launch(workload: str, num_blocks: int, block_s: float, workers: int) -> dict[str, Any]:
    def command(folder: str) -> list[str]:
        return [
            *(sys.executable, "-m", "manyhands.cli.main", "run", "-n", str(workers), "--ui", "none"),
            *("--run-dir", f"{folder}/run", "-m", "bench.ddp_script", workload),
            *("--blocks", str(num_blocks), "--block-s", str(block_s), "--meet-at", f"{folder}/meet"),
        ]

    return run_script(command)
