"""Trainer overhead: `mh.Trainer` in one process against the loop written by hand."""

from __future__ import annotations

import sys

from bench.driver.child import measure_script
from bench.results.compare import Measured, Size

__all__ = ["measure"]


def measure(workload: str, size: Size) -> Measured:
    """Blocks of one workload, in child processes started as a user would start one: `python script`."""

    def command(num_blocks: int, folder: str) -> list[str]:
        return [
            *(sys.executable, "-m", "bench.replicas.overhead_script", workload),
            *("--blocks", str(num_blocks), "--block-s", str(size.block_s), "--run-dir", f"{folder}/run"),
        ]

    return measure_script(workload, size, 1, command)
