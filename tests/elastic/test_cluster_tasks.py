"""Elastic runs by TF_CONFIG without servers: tasks that start late, twice or never, each with a separate command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.elastic.conftest import ENDLESS, TRAINING, check_commits
from tests.elastic.conftest import Run as LocalRun
from tests.parameter_server.runs.test_ps_tasks import free_addresses

pytestmark = [pytest.mark.long, pytest.mark.faults]

MH_RUN = ["-m", "manyhands.cli.main", "run", "--ui", "plain", "-n", "1", "--elastic", "1:4", "--run-dir", "run"]
AS_SETTINGS = {"STRATEGY": "multi_worker", "WORKERS": "1", "ELASTIC": "1:4", "RUN_DIR": "run", "UI": "plain"}
Task = subprocess.Popen[bytes]


class Run(LocalRun):
    """A chief and three workers are listed. `process` is the chief, whose end is the end of the run."""

    def __init__(self, folder: Path, plainly: bool) -> None:
        """`plainly`: by `python training.py`, with settings in the environment; else by `mh run`."""
        self.folder, self.directory, self._plainly = folder, folder / "run", plainly
        chief, *workers = free_addresses(4)
        self._cluster = {"chief": [chief], "worker": workers}

    def start_chief(self) -> None:
        self.process = self.start("chief", 0, "output.txt", "results.txt")

    def start(self, job: str, index: int, errors: str = "others.txt", output: str = "others.txt") -> Task:
        task = {"cluster": self._cluster, "task": {"type": job, "index": index}}
        added = {f"MANYHANDS_{name}": text for name, text in AS_SETTINGS.items()} if self._plainly else {}
        command = [sys.executable, *([] if self._plainly else MH_RUN), str(TRAINING), json.dumps(ENDLESS)]
        with ExitStack() as files:
            out, err = (files.enter_context(open(self.folder / name, "a")) for name in (output, errors))
            environ = {**os.environ, **added, "TF_CONFIG": json.dumps(task)}
            return subprocess.Popen(command, cwd=self.folder, env=environ, stdout=out, stderr=err)

    def await_commit_of(self, task: Task) -> None:
        """Of a worker that a task has started."""

        def pids() -> set[int]:
            return {child.pid for child in psutil.Process(task.pid).children(recursive=True)}

        self.until(lambda: pids() & {commit["pid"] for commit in self.commits()}, "a commit by it", 250)


@pytest.fixture(params=[False, True], ids=["mh run", "python"])
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    run = Run(tmp_path, request.param)
    yield run
    run.close()


def test_one_worker_comes_late_and_again_and_another_never(run: Run, undisturbed: Any) -> None:
    run.start_chief()
    first = run.start("worker", 0)
    run.until(lambda: run.step() > 5, "steps without the others", 250)
    assert "2 of 4 hosts are there" in run.output()
    late = run.start("worker", 1)
    run.await_commit_of(late)
    late.kill()
    late.wait()
    run.until(lambda: run.generations()[-1].workers == 2, "that it is missed")
    again = run.start("worker", 1)
    run.await_commit_of(again)
    run.process.send_signal(signal.SIGTERM)
    assert [task.wait(100) for task in (run.process, first, again)] == [75] * 3, run.output()

    run.start_chief()
    first = run.start("worker", 0)
    reached = run.step()
    run.until(lambda: run.step() > reached + 5, "that it trains without the others", 250)
    result = run.enough()
    assert result == undisturbed({"steps": result["reached"]})
    assert first.wait(60) == 0
    check_commits(run)
