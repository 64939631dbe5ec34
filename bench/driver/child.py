"""Runs a benchmark's script in a new process, in a folder that is removed afterwards."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.programs.workloads import WORKLOADS
from bench.results.compare import Measured, Size, divide

__all__ = ["ScriptFailed", "measure_script", "run_script"]

TIMEOUT_S = 1800.0
ROOT = Path(__file__).resolve().parents[2]


class ScriptFailed(Exception):
    """A benchmark's script ended with an error; the text is its output."""


def run_script(command: Callable[[str], list[str]]) -> dict[str, Any]:
    """The last line that the script printed, read as JSON. `command` is called with the folder for the run's files.

    Progress goes to a pipe, as in a job under a batch system, and is read here.
    """
    with tempfile.TemporaryDirectory(prefix="manyhands-bench-") as folder:
        done = subprocess.run(command(folder), cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise ScriptFailed(f"exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_script(workload: str, size: Size, workers: int, command: Callable[[int, str], list[str]]) -> Measured:
    """Blocks of one workload over several launches; `command` gets a launch's number of blocks, and a folder."""
    found = [run_script(partial(command, num_blocks)) for num_blocks in divide(size)]
    settings = {
        "model": WORKLOADS[workload].model,
        "batch": WORKLOADS[workload].batch * workers,
        "workers": workers,
        "threads": found[0]["threads"],
        "steps_per_block": [launch["steps"] for launch in found],
    }
    return Measured([launch["seconds"] for launch in found], settings)
