"""Keras's fit in a scope against Keras alone: `python -m bench keras`.

SGD with momentum on the 10 M MLP, the same global batch on all sides: two workers of one thread, one worker, Keras with
one thread, and Keras with all cores; the last two twice, for the A/A control.
"""

from __future__ import annotations

import importlib.util
import sys

from bench.driver.baton import Process, Side, interleave
from bench.driver.sides import MH, plain_environment
from bench.results.compare import Measured, Size

ROWS = 256


def ours(workers: int) -> Side:
    def processes(folder: str) -> list[Process]:
        run = ("run", "-n", str(workers), "--threads", "1", "--ui", "none", "--run-dir", f"{folder}/run")
        command = [*MH, *run, "-m", "bench.replicas.keras_side", "scope", str(ROWS), "1"]
        return [Process(command, plain_environment(allocator=False))]

    return Side("1 worker" if workers == 1 else f"{workers} workers", workers, processes)


def keras(name: str, threads: int) -> Side:
    command = (sys.executable, "-m", "bench.replicas.keras_side", "keras", str(ROWS), str(threads))
    environment = plain_environment()
    environment.pop("OMP_NUM_THREADS" if threads == 0 else "", None)
    return Side(name, 1, lambda _: [Process(command, environment | {"RANK": "0"})])


def why_not(workload: str) -> str | None:
    return None if importlib.util.find_spec("keras") else "Keras is not installed: pip install manyhands[keras]"


def measure(workload: str, size: Size) -> Measured:
    """Seconds per step of each side, in rounds."""
    sides = [ours(2), ours(1)]
    for name, threads in (("Keras, 1 thread", 1), ("Keras, all cores", 0)):
        sides += [keras(name, threads), keras(f"{name} again", threads)]
    seconds, facts = interleave(sides, size.num_blocks, size.block_s)
    return Measured([seconds], {"batch": ROWS, "threads": 1, "workers": 2, **facts})
