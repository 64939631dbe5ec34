"""Seconds of a worker's start and of a replacement, forked and spawned: `python -m tools.start_times [--rounds N]`.

A start is from the command `mh run` to the first line of the script, so it has the start of the agent in it; a
replacement is from the end of `kill -9` of one of two workers to the first line of the script in the worker that
replaces it, and to its first step. This file is also the script. Start reading at `measure`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

STARTS = {"forked": "auto", "spawned": "spawn"}
GIVE_UP_S = 120.0


# ---- the script ----------------------------------------------------------------------------------------------------


def note(folder: Path, what: str) -> None:
    """The time, in a file that is complete as soon as it is there. The clock is the same in all processes of a host."""
    draft = folder / f".{what}.{os.getpid()}"
    draft.write_text(str(time.monotonic()))
    draft.rename(folder / f"{what}.{os.getpid()}")


def train(folder: Path) -> None:
    note(folder, "line")
    import torch

    import manyhands as mh

    class Hook:
        def after_step(self, trainer: mh.Trainer, step: int, stats: object) -> None:
            if not (folder / f"step.{os.getpid()}").exists():
                note(folder, "step")
            time.sleep(0.01)
            if (folder / "enough").exists():
                trainer.request_stop()

    torch.manual_seed(0)
    trainer = mh.Trainer(
        lambda: torch.nn.Linear(4, 1), torch.nn.MSELoss(), lambda p: torch.optim.SGD(p, lr=0.1), hooks=[Hook()]
    )
    trainer.fit((torch.randn(64, 4), torch.randn(64, 1)), steps=10**6, batch_size=16)


# ---- what starts it ------------------------------------------------------------------------------------------------


def measure(rounds: int = 5) -> dict[str, dict[str, float]]:
    """Medians of so many runs by what was measured and how workers start."""
    found: dict[str, dict[str, float]] = {}
    for how, start in STARTS.items():
        runs = [_run(start) for _ in range(rounds)]
        for what in runs[0]:
            found.setdefault(what, {})[how] = round(statistics.median(run[what] for run in runs), 3)
    return found


def _run(start: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.monotonic()
        where = ["--run-dir", f"{name}/run", "--ui", "none", "--threads", "1", "--start", start]
        words = ["run", "-n", "2", "--elastic", "1:2", *where, __file__, "--train", name]
        run = subprocess.Popen([sys.executable, "-m", "manyhands.cli.main", *words])
        try:
            first = _wait(run, lambda: _noted(folder, "step"), 2)
            lines = _noted(folder, "line")
            killed = min(first)
            os.kill(killed, signal.SIGKILL)
            at = time.monotonic()
            line, step = (_wait(run, lambda what=what: _noted(folder, what), 3) for what in ("line", "step"))
            (folder / "enough").touch()
            run.wait(GIVE_UP_S)
        finally:
            run.kill()
            run.wait()
        return {
            "start: mh run to the script": min(lines.values()) - began,
            "replacement: kill to the script": max(line.values()) - at,
            "replacement: kill to its first step": max(step.values()) - at,
        }


def _noted(folder: Path, what: str) -> dict[int, float]:
    return {int(path.suffix[1:]): float(path.read_text()) for path in folder.glob(f"{what}.*")}


def _wait(run: subprocess.Popen[bytes], found: Callable[[], dict[int, float]], number: int) -> dict[int, float]:
    deadline = time.monotonic() + GIVE_UP_S
    while len(there := found()) < number:
        if run.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{len(there)} of {number} workers are there; the run's exit code is {run.poll()}")
        time.sleep(0.005)
    return there


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--train", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    if asked.train is not None:
        train(asked.train)
    else:
        print(json.dumps(measure(asked.rounds), indent=1))


if __name__ == "__main__":
    main()
