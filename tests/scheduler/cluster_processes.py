"""A real `mh cluster up` with real jobs, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from manyhands.scheduler.queue_folder import QueueFolder, is_locked

MH = [sys.executable, "-m", "manyhands.cli.main"]
WAIT_S = 120.0

# A job without torch: it notes each beginning and each end, and ends after the given seconds.
PLAIN = """
import os, sys, time
with open("began", "a") as file: file.write(sys.argv[1] + "\\n")
deadline = time.monotonic() + float(sys.argv[2])
while time.monotonic() < deadline: time.sleep(0.02)
with open("ended", "a") as file: file.write(sys.argv[1] + "\\n")
"""


def environment(queue: Path) -> dict[str, str]:
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("MANYHANDS_", "PET_", "TF_"))}
    return {**clean, "MANYHANDS_QUEUE": str(queue)}


class RealCluster:
    def __init__(self, folder: Path, *words: str) -> None:
        self.folder, self.queue = folder, QueueFolder(folder / "queue")
        self._words = words
        self.daemon: subprocess.Popen[bytes] | None = None

    def mh(self, *words: str, fails: bool = False) -> str:
        done = subprocess.run(
            [*MH, *words],
            cwd=self.folder,
            env=environment(self.queue.path),
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert (done.returncode != 0) == fails, done.stderr
        return done.stderr if fails else done.stdout

    def up(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / "daemon.txt").open("ab") as output:
            self.daemon = subprocess.Popen(
                [*MH, "cluster", "up", *self._words, *words],
                cwd=self.folder,
                env=environment(self.queue.path),
                stdout=output,
                stderr=output,
            )
        return self.daemon

    def said(self) -> str:
        return (self.folder / "daemon.txt").read_text()

    def jobs(self) -> dict[str, dict[str, Any]]:
        return {row["job"]: row for row in json.loads(self.mh("queue", "--json"))["jobs"]}

    def until(self, condition: Callable[[], Any], what: str, wait_s: float = WAIT_S) -> Any:
        deadline = time.monotonic() + wait_s
        while not (found := condition()):
            assert time.monotonic() < deadline, f"{what} did not happen:\n{self.said()}"
            time.sleep(0.1)
        return found

    def close(self) -> None:
        """End the daemon and, as it leaves runs alone, each run that it started."""
        if self.daemon is not None and self.daemon.poll() is None:
            self.daemon.kill()
            self.daemon.wait()
        for job in self.queue.submitted():
            alive = self.queue.jobs / job / "alive"
            while is_locked(alive):
                with contextlib.suppress(OSError, ValueError, KeyError):
                    record = json.loads((self.queue.run_dir(job) / "run.json").read_bytes())
                    os.kill(record["pid"], signal.SIGKILL)
                time.sleep(0.05)


@contextlib.contextmanager
def real_cluster(folder: Path, *words: str) -> Iterator[RealCluster]:
    cluster = RealCluster(folder, *words)
    try:
        yield cluster
    finally:
        cluster.close()
