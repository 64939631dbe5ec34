"""Trainer overhead: `mh.Trainer` in one process against the loop written by hand."""

from __future__ import annotations

import sys
from typing import Any

from bench.child import run_script
from bench.compare import compare, divide
from bench.interleave import OURS
from bench.workloads import OVERHEAD

__all__ = ["ALLOWED", "TITLE", "measure"]

TITLE = "One process: trainer against a loop by hand"
ALLOWED = 0.02


def measure(workload: str, *, num_blocks: int, block_s: float, launches: int) -> dict[str, Any]:
    """Blocks of one workload, in child processes started as a user would start one: `python script`."""
    found = [_launch(workload, blocks, block_s) for blocks in divide(num_blocks, launches)]
    result = compare([launch["seconds"] for launch in found], OURS, "by hand", "by hand again", ALLOWED)
    settings = {
        "batch": OVERHEAD[workload].batch,
        "threads": found[0]["threads"],
        "steps_per_block": [launch["steps"] for launch in found],
    }
    return {"bench": "overhead", "workload": workload, "model": OVERHEAD[workload].model, **settings, **result}


def _launch(workload: str, num_blocks: int, block_s: float) -> dict[str, Any]:
    def command(folder: str) -> list[str]:
        return [
            *(sys.executable, "-m", "bench.overhead_script", workload),
            *("--blocks", str(num_blocks), "--block-s", str(block_s), "--run-dir", f"{folder}/run"),
        ]

    return run_script(command)
