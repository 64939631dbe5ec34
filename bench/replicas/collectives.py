"""All-reduce between two ranks of one host: through shared memory, against Gloo and against one copy of the memory."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import Any

from bench.driver.child import ROOT, ScriptFailed
from bench.driver.sides import plain_environment
from bench.results.compare import Measured, Size, divide
from manyhands.comm.host_memory import HostMemory
from manyhands.comm.shared_memory import Plane
from manyhands.native import library
from manyhands.native import why_not as why_no_library

__all__ = ["NUM_BYTES", "WORLD", "measure", "why_not"]

WORLD = 2
NUM_BYTES = {"shared": 100_000_000, "ordinary": 100_000_000, "latency": 1024}
TIMEOUT_S = 900.0


def why_not(workload: str) -> str | None:
    return f"no shared-memory collectives: {why_no_library()}" if library is None else None


def measure(workload: str, size: Size) -> Measured:
    found = [_launch(workload, blocks, size.block_s) for blocks in divide(size)]
    settings = {"bytes": NUM_BYTES[workload], "workers": WORLD, "threads": 1}
    facts = {"calls_per_block": [launch["calls"] for launch in found]}
    return Measured([launch["seconds"] for launch in found], {**settings, **facts})


def _launch(workload: str, num_blocks: int, block_s: float) -> dict[str, Any]:
    """Two ranks, each with one thread; all sides in the same processes, so with the same allocator settings."""
    # Space for every rank's tensor and the sum.
    sizes = {"plane": Plane.num_bytes(WORLD), "data": (WORLD + 1) * NUM_BYTES[workload]}
    memory = HostMemory()
    try:
        with tempfile.TemporaryDirectory(prefix="manyhands-bench-") as folder:
            words = [workload, str(num_blocks), str(block_s), f"{folder}/store"]
            words += [f"{memory.fd}:{size}:{memory.allot(name, size)}" for name, size in sizes.items()]
            return _outcome([_start(rank, words, memory.fd) for rank in range(WORLD)])
    finally:
        memory.close()


def _start(rank: int, words: list[str], memory: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bench.replicas.collectives_script", str(rank), *words],
        cwd=ROOT,
        env=plain_environment() | {"PYTHONPATH": str(ROOT)},
        pass_fds=[memory],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _outcome(ranks: list[subprocess.Popen[str]]) -> dict[str, Any]:
    try:
        outputs = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    except subprocess.TimeoutExpired as error:
        raise ScriptFailed(f"no end after {TIMEOUT_S:g} s") from error
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(rank.returncode for rank in ranks):
        raise ScriptFailed("\n".join(error[-3000:] for _, error in outputs))
    found: dict[str, Any] = json.loads(outputs[0][0].splitlines()[-1])
    return found
