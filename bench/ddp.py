"""Two workers: `mh run -n 2` against DistributedDataParallel on Gloo, in the same two processes."""

from __future__ import annotations

import sys
from typing import Any

from bench.child import run_script
from bench.compare import compare
from bench.interleave import OURS
from bench.workloads import DDP

__all__ = ["ALLOWED", "TITLE", "measure"]

TITLE = "Two workers: mirrored against DistributedDataParallel on Gloo"
ALLOWED = 0.0


def measure(workload: str, *, num_blocks: int, block_s: float, workers: int = 2) -> dict[str, Any]:
    def command(folder: str) -> list[str]:
        return [
            *(sys.executable, "-m", "manyhands.cli.main", "run", "-n", str(workers), "--ui", "none"),
            *("--run-dir", f"{folder}/run", "-m", "bench.ddp_script", workload),
            *("--blocks", str(num_blocks), "--block-s", str(block_s), "--meet-at", f"{folder}/meet"),
        ]

    found = run_script(command)
    result = compare(found["seconds"], OURS, "DDP", "DDP again", ALLOWED)
    settings = {
        "batch": DDP[workload].batch * workers,
        "workers": workers,
        "threads": found["threads"],
        "steps_per_block": found["steps"],
    }
    return {"bench": "ddp", "workload": workload, "model": DDP[workload].model, **settings, **result}
