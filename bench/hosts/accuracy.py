"""What lossy gradient compression costs in accuracy: handwritten digits on two hosts, exact and lossy, per seed."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Sequence

from bench.driver.baton import Process
from bench.driver.child import ROOT, ScriptFailed
from bench.hosts.hosts import REDUCER, Hosts, run_on, two_hosts, why_not
from bench.results.compare import Measured, Size

__all__ = ["measure", "run_to_end", "why_not"]

REDUCERS: dict[str, Sequence[str]] = {"exact": (), "bf16": (REDUCER, "bf16"), "int8": (REDUCER, "int8")}
NUM_SEEDS, EPOCHS = 5, 15
TIMEOUT_S = 900.0


def measure(_workload: str, size: Size) -> Measured:
    """360 pictures are held out, so half a point is two of them: only the mean over seeds is significant."""
    seeds = range(min(NUM_SEEDS, size.num_blocks))
    with two_hosts() as hosts:
        found = {name: [_accuracy(hosts, options, seed) for seed in seeds] for name, options in REDUCERS.items()}
    return Measured([found], {"workers": 2, "threads": 1, "epochs": EPOCHS, "seeds": len(seeds)})


def _accuracy(hosts: Hosts, options: Sequence[str], seed: int) -> float:
    script = ("-m", "manyhands.recipes.digits", "--epochs", str(EPOCHS))
    with tempfile.TemporaryDirectory(prefix="manyhands-bench-") as folder:
        options = (*options, "--strategy", "mirrored", "--seed", str(seed))
        output = run_to_end(run_on(hosts, folder, options, script))
    right = re.search(r"([\d.]+)% right", output)
    if right is None:
        raise ScriptFailed(output)
    return float(right.group(1)) / 100.0


def run_to_end(processes: Sequence[Process]) -> str:
    """The output of the first process; all of them end with it, or after `TIMEOUT_S`."""
    started: list[subprocess.Popen[str]] = []
    deadline = time.monotonic() + TIMEOUT_S
    try:
        for process in processes:
            _wait_until_it_may_start(process, started, deadline)
            both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if not started else {}
            started.append(_start(process, **both))
        output, _ = started[0].communicate(timeout=max(0.0, deadline - time.monotonic()))
        if started[0].returncode:
            raise ScriptFailed(f"exit code {started[0].returncode}\n{output[-4000:]}")
        for other in started[1:]:
            other.wait(30.0)
        return output
    except subprocess.TimeoutExpired as error:
        raise ScriptFailed(f"no end after {TIMEOUT_S:g} s") from error
    finally:
        for process_ in started:
            process_.kill()
            process_.wait()


def _wait_until_it_may_start(process: Process, started: Sequence[subprocess.Popen[str]], deadline: float) -> None:
    """Stop waiting once another process has ended: then the file may never appear, and the first process says why."""
    while process.after is not None and not process.after.exists():
        if any(other.poll() is not None for other in started):
            return
        if time.monotonic() > deadline:
            raise ScriptFailed(f"{process.after.name} was not there after {TIMEOUT_S:g} s")
        time.sleep(0.05)


def _start(
    process: Process, stdout: int = subprocess.DEVNULL, stderr: int = subprocess.DEVNULL
) -> subprocess.Popen[str]:
    environment = {**process.environment, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(process.command, cwd=ROOT, env=environment, stdout=stdout, stderr=stderr, text=True)
