"""Trainer overhead: `mh.Trainer` in one process against the loop written by hand."""

from __future__ import annotations

import sys
from typing import Any

from bench.child import run_script
from bench.compare import compare
from bench.interleave import OURS
from bench.workloads import OVERHEAD

__all__ = ["ALLOWED", "TITLE", "measure"]

TITLE = "One process: trainer against a loop by hand"
ALLOWED = 0.02


def measure(workload: str, *, num_blocks: int, block_s: float) -> dict[str, Any]:
    """Blocks of one workload, in a child process started as a user would start it: `python script`."""

    def command(folder: str) -> list[str]:
        return [
            *(sys.executable, "-m", "bench.overhead_script", workload),
            *("--blocks", str(num_blocks), "--block-s", str(block_s), "--run-dir", f"{folder}/run"),
        ]

    found = run_script(command)
    result = compare(found["seconds"], OURS, "by hand", "by hand again", ALLOWED)
    settings = {"batch": OVERHEAD[workload].batch, "threads": found["threads"], "steps_per_block": found["steps"]}
    return {"bench": "overhead", "workload": workload, "model": OVERHEAD[workload].model, **settings, **result}
