"""Three real jobs on this machine, the longest first and already running: policy jct against one after the other.

`python -m bench.scheduler.three_jobs`. Both sides are a real `mh cluster up` with 2 workers and the same jobs. A step
sleeps, as a device would compute, and takes half the time on two workers: so other work on this machine does not
decide. First come, first served means both workers for one job at a time, in order.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "tests" / "scheduler" / "slow_training.py"
MH = [sys.executable, "-m", "manyhands.cli.main"]
STEP_S = 0.2
LONG, SHORT = 1200, 60
AHEAD_S = 20.0
"""How long the long job runs before the short ones arrive."""
LIMIT_S = 900.0


def completion_s(folder: Path, *, in_order: bool) -> list[float]:
    """Seconds from the arrival of each job to its end."""
    shutil.copy(SCRIPT, folder / "train.py")
    environ = {**os.environ, "MANYHANDS_QUEUE": str(folder / "queue"), "OMP_NUM_THREADS": "1"}
    size = ["--least", "2" if in_order else "1", "--most", "2"]

    def submit(steps: int, *words: str) -> None:
        command = [*MH, "submit", *size, *words, "train.py", str(steps), str(STEP_S)]
        subprocess.run(command, cwd=folder, env=environ, check=True, stdout=subprocess.DEVNULL)

    submit(LONG)
    with (folder / "daemon.txt").open("wb") as output:
        daemon = subprocess.Popen(
            [*MH, "cluster", "up", "--workers", "2", "--json"], cwd=folder, env=environ, stdout=output
        )
        try:
            arrived = [time.time()]
            time.sleep(AHEAD_S)
            for job in ("1", "2"):
                submit(SHORT, *(["--after", job] if in_order else []))
                arrived.append(time.time())
            ended = _await_ends(folder / "daemon.txt", 3)
        finally:
            daemon.terminate()
            daemon.wait()
    return [ended[str(number)] - arrived[number - 1] for number in (1, 2, 3)]


def _await_ends(file: Path, jobs: int) -> dict[str, float]:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
        ended = {line["job"]: line["time_s"] for line in lines if line["state"] in ("done", "failed", "cancelled")}
        if failed := [line for line in lines if line["state"] in ("failed", "cancelled")]:
            raise RuntimeError(f"a job did not finish: {failed[0]}")
        if len(ended) == jobs:
            return ended
        time.sleep(0.2)
    raise TimeoutError(f"the jobs did not end within {LIMIT_S:g} s")


def main() -> None:
    means = {}
    for name, in_order in (("first come, first served", True), ("jct", False)):
        with tempfile.TemporaryDirectory() as folder:
            times = completion_s(Path(folder), in_order=in_order)
        means[name] = sum(times) / len(times)
        print(f"{name}: {', '.join(f'{one:.0f} s' for one in times)}; mean {means[name]:.1f} s", flush=True)
    print(f"mean completion {means['first come, first served'] / means['jct']:.2f} times better")


if __name__ == "__main__":
    main()
