"""Trainer overhead: `mh.Trainer` in one process against the loop written by hand."""

from __future__ import annotations

import sys
from typing import Any

from bench.child import run_script
from bench.compare import Measured, Size, divide
from bench.workloads import WORKLOADS

__all__ = ["measure"]


def measure(workload: str, size: Size) -> Measured:
    """Blocks of one workload, in child processes started as a user would start one: `python script`."""
    found = [_launch(workload, blocks, size.block_s) for blocks in divide(size)]
    settings = {
        "model": WORKLOADS[workload].model,
        "batch": WORKLOADS[workload].batch,
        "workers": 1,
        "threads": found[0]["threads"],
        "steps_per_block": [launch["steps"] for launch in found],
    }
    return Measured([launch["seconds"] for launch in found], settings)


def _launch(workload: str, num_blocks: int, block_s: float) -> dict[str, Any]:
    def command(folder: str) -> list[str]:
        return [
            *(sys.executable, "-m", "bench.overhead_script", workload),
            *("--blocks", str(num_blocks), "--block-s", str(block_s), "--run-dir", f"{folder}/run"),
        ]

    return run_script(command)
