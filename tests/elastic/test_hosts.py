"""Elastic runs on two hosts, which are network namespaces: deaths, a partition, a host that gets SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.elastic.conftest import ENDLESS, TRAINING, check_commits
from tests.elastic.conftest import Run as LocalRun
from tests.end_to_end.namespaces import ADDRESSES, two_hosts, why_not

REASON = why_not()
MH = [sys.executable, "-m", "manyhands.cli.main"]

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


class Run(LocalRun):
    """Two workers on each of two hosts. The first one has the coordinator; the second may come later."""

    def __init__(self, folder: Path, asked: dict[str, Any], hosts: tuple[list[str], list[str]], wanted: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.directory, self._hosts = folder, folder / "run", hosts
        common = ["--ui", "plain", "--insecure-data-plane"]
        words = ["run", "-n", "2", "--run-dir", "run", "--elastic", "1:4", "--hosts-wanted", str(wanted), *common]
        self.process = self._start(
            hosts[0], "output.txt", *words, "--listen", ADDRESSES[0], "--join-file", "join",
            "--strategy", "multi_worker", str(TRAINING), json.dumps(asked),
        )  # fmt: skip
        self.second: subprocess.Popen[bytes] | None = None

    def join(self) -> None:
        self.until((self.folder / "join").exists, "a join file")
        self.second = self._start(self._hosts[1], "second.txt", "agent", "--join", "join", "-n", "2")

    def _start(self, prefix: list[str], output: str, *words: str) -> subprocess.Popen[bytes]:
        results = os.open(self.folder / f"results{output.removeprefix('output')}", os.O_WRONLY | os.O_CREAT)
        fd = os.open(self.folder / output, os.O_WRONLY | os.O_CREAT)
        try:
            return subprocess.Popen([*prefix, *MH, *words], cwd=self.folder, stdout=results, stderr=fd)
        finally:
            os.close(results)
            os.close(fd)

    def workers_of_second(self) -> list[int]:
        assert self.second is not None
        children = psutil.Process(self.second.pid).children(recursive=True)
        return sorted(
            child.pid for child in children if "manyhands.launcher.worker_process.bootstrap" in child.cmdline()
        )

    def cut(self) -> None:
        """No packet gets through between the hosts any more, and no connection is closed."""
        name = self._hosts[1][3]
        links = json.loads(subprocess.run(["ip", "-n", name, "-j", "link"], check=True, capture_output=True).stdout)
        [link] = [one["ifname"] for one in links if one["ifname"] != "lo"]
        subprocess.run(["ip", "-n", name, "link", "set", link, "down"], check=True)

    def close(self) -> None:
        super().close()
        if self.second is not None:
            self.second.kill()
            self.second.wait()


@pytest.fixture
def run_on_two_hosts(tmp_path: Path) -> Iterator[Any]:
    with two_hosts() as hosts:
        runs: list[Run] = []

        def start(asked: dict[str, Any], wanted: int = 2) -> Run:
            runs.append(Run(tmp_path / "hosts", asked, hosts, wanted))
            if wanted == 2:
                runs[-1].join()
            return runs[-1]

        yield start
        for run in runs:
            run.close()


@pytest.mark.long
def test_a_worker_killed_on_the_other_host_is_replaced(run_on_two_hosts: Any, undisturbed: Any) -> None:
    run = run_on_two_hosts(ENDLESS)
    run.until(lambda: run.step() > 10, "step 10")
    os.kill(run.workers_of_second()[0], signal.SIGKILL)
    run.until(lambda: "1 joined" in [event.why for event in run.generations()], "a replacement")
    result = run.enough()
    assert result == undisturbed({"steps": result["reached"]})
    assert run.second.wait(60) == 0
    check_commits(run)


@pytest.mark.long
def test_after_a_partition_the_side_with_the_coordinator_continues_and_the_other_ends(
    run_on_two_hosts: Any, undisturbed: Any
) -> None:
    run = run_on_two_hosts(ENDLESS)
    run.until(lambda: run.step() > 10, "step 10")
    cut_off = set(run.workers_of_second())
    run.cut()
    cut_at = time.monotonic()

    def commits_of_others() -> list[Any]:
        return [commit for commit in run.commits() if commit["pid"] not in cut_off and commit["at"] > cut_at + 0.5]

    by_others = run.until(commits_of_others, "steps without the other host")
    result = run.enough()
    assert result == undisturbed({"steps": result["reached"]})
    assert run.second.wait(100) != 0
    check_commits(run)
    theirs = [commit["step"] for commit in run.commits() if commit["pid"] in cut_off]
    assert max(theirs) <= min(commit["step"] for commit in by_others), "the cut-off side took no step alone"
    assert not any(psutil.pid_exists(pid) for pid in cut_off)


@pytest.mark.long
def test_a_host_that_joins_a_run_on_one_host_trains_and_leaves_again(run_on_two_hosts: Any, undisturbed: Any) -> None:
    run = run_on_two_hosts(ENDLESS, wanted=1)
    run.until(lambda: run.step() > 10, "step 10")
    run.join()
    run.until(lambda: [event.workers for event in run.generations()][-1] == 4, "four workers")
    theirs = set(run.workers_of_second())
    run.until(lambda: theirs <= {commit["pid"] for commit in run.commits()}, "a commit by each of them")
    run.second.send_signal(signal.SIGTERM)
    assert run.second.wait(60) == 0
    reached = run.step()
    run.until(lambda: run.step() > reached + 5, "five steps more")
    result = run.enough()
    assert result == undisturbed({"steps": result["reached"]})
    check_commits(run)
    assert not [event for event in run.generations() if "died" in event.why], (
        "a host that leaves on SIGTERM costs no step"
    )
