"""Two workers: `mh run -n 2` against DistributedDataParallel on Gloo, in the same two processes."""

from __future__ import annotations

from bench.driver.child import measure_script
from bench.driver.sides import MH
from bench.results.compare import Measured, Size

__all__ = ["measure"]

WORKERS = 2


def measure(workload: str, size: Size) -> Measured:
    def command(num_blocks: int, folder: str) -> list[str]:
        return [
            *(*MH, "run", "-n", str(WORKERS), "--threads", "1", "--ui", "none"),
            *("--run-dir", f"{folder}/run", "-m", "bench.replicas.ddp_script", workload),
            *("--blocks", str(num_blocks), "--block-s", str(size.block_s), "--meet-at", f"{folder}/store"),
        ]

    return measure_script(workload, size, WORKERS, command)
