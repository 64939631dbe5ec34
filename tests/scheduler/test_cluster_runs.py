"""A real daemon with real runs: the whole way, kills, notices that are ignored."""

from __future__ import annotations

import os
import random
import shutil
import signal
import stat
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from manyhands.events import Resumed
from manyhands.observe.run_events import read_events
from manyhands.scheduler.queue_folder import is_locked
from manyhands.scheduler.queue_state import react
from tests.scheduler.cluster_processes import MH, PLAIN, RealCluster, environment, real_cluster


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def test_jobs_submitted_without_a_daemon_run_when_it_comes_and_bad_ones_do_not_stop_the_others(tmp_path):
    (tmp_path / "job.py").write_text(PLAIN)
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    shutil.copy(tmp_path / "job.py", tmp_path / "changed.py")
    with real_cluster(tmp_path, "--workers", "2") as cluster:
        fixed = ("submit", "--most", "1")
        assert cluster.mh(*fixed, "bad.py") == "job 1: 1 to 1 workers; it starts when mh cluster up runs\n"
        cluster.mh(*fixed, "changed.py", "c", "0")
        cluster.mh(*fixed, "job.py", "a", "0")
        cluster.mh(*fixed, "--after", "3", "job.py", "b", "0")
        assert "There is no job 9" in cluster.mh(*fixed, "--after", "9", "job.py", fails=True)
        with (tmp_path / "changed.py").open("a") as file:
            file.write("# another one\n")
        assert "No daemon serves this queue" in cluster.mh("queue")
        daemon = cluster.up("--until-empty")
        cluster.until(cluster.queue.has_daemon, "a daemon")
        assert "has a daemon already: " in cluster.mh("cluster", "up", fails=True)
        assert daemon.wait(100) == 0, cluster.said()
        jobs = cluster.jobs()
        assert [jobs[job]["state"] for job in "1234"] == ["failed", "failed", "done", "done"]
        assert "was changed after the job was submitted" in jobs["2"]["why"]
        assert lines(tmp_path / "ended") == ["a", "b"]
        state, entries = cluster.queue.log.read()
        for entry in entries:
            state, actions = react(state, entry.event, entry.at)
            assert actions == entry.actions, "the same log leads to the same decisions"
        assert state == cluster.queue.log.load() and len(state.jobs) == 4
        assert cluster.queue.submission("3").environment["PATH"] == os.environ["PATH"]
        assert cluster.mh("queue", "--why", "1").startswith("failed with exit code")
        assert "Job 3 has ended: finished" in cluster.mh("cancel", "3", fails=True)
        assert "needs 3 workers or more, and the cluster has 2" in cluster.mh(
            "submit", "--least", "3", "job.py", fails=True
        )
        for path in (cluster.queue.path, cluster.queue.jobs / "1", cluster.queue.jobs / "1" / "submission.json"):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, "a submission holds an environment"


@pytest.mark.long
def test_a_daemon_that_is_killed_50_times_loses_no_job_and_runs_none_twice(tmp_path):
    (tmp_path / "job.py").write_text(PLAIN)
    chance, num_jobs, kills = random.Random(7), 16, 0
    submissions: list[subprocess.Popen[bytes]] = []
    with real_cluster(tmp_path, "--workers", "3", "--policy", "fair") as cluster:
        try:
            for number in range(50):
                daemon = cluster.up()
                if number % 3 == 0 and len(submissions) < num_jobs:
                    words = [
                        "submit",
                        "--most",
                        "1",
                        "job.py",
                        f"job-{len(submissions)}",
                        f"{chance.uniform(0.1, 4):.2f}",
                    ]
                    environ = environment(cluster.queue.path)
                    submissions.append(
                        subprocess.Popen([*MH, *words], cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL)
                    )
                time.sleep(chance.uniform(0.3, 3.0))  # a kill at any moment is what this is about
                daemon.kill()
                daemon.wait()
                kills += 1
            assert all(each.wait(100) == 0 for each in submissions)
            assert cluster.up("--until-empty").wait(400) == 0, cluster.said()
        finally:
            for each in submissions:
                each.kill()
                each.wait()
        assert kills == 50
        states = Counter(row["state"] for row in cluster.jobs().values())
        assert states == {"done": len(submissions)}, cluster.jobs()
        names = sorted(f"job-{number}" for number in range(len(submissions)))
        assert sorted(lines(tmp_path / "ended")) == names, "each exactly once"
        assert sorted(lines(tmp_path / "began")) == names, "each exactly once"


def training(folder: Path) -> None:
    shutil.copy(Path(__file__).with_name("slow_training.py"), folder / "train.py")


def run_pid(cluster: RealCluster, job: str) -> int:
    from manyhands.control.run_directory import read_run

    return read_run(cluster.queue.run_dir(job)).pid


@pytest.mark.long
def test_a_job_that_ignores_its_notice_is_killed_and_resumes_from_its_last_checkpoint(tmp_path):
    training(tmp_path)
    with real_cluster(tmp_path, "--workers", "1", "--policy", "priority") as cluster:
        cluster.mh("submit", "--most", "1", "--grace", "1", "--every-steps", "5", "train.py", "300", "0.05")
        cluster.up()
        checkpoints = cluster.queue.run_dir("1") / "checkpoints"
        cluster.until(lambda: any(one.name.endswith("10") for one in checkpoints.glob("step-*")), "a checkpoint")
        os.kill(run_pid(cluster, "1"), signal.SIGSTOP)
        cluster.mh("submit", "--most", "1", "--priority", "100", "train.py", "5", "0.05")
        cluster.until(lambda: cluster.jobs()["2"]["state"] == "done", "the second job")
        cluster.until(lambda: cluster.jobs()["1"]["state"] == "done", "the first job")
        events = list(read_events(cluster.queue.run_dir("1")))
        assert any(isinstance(event, Resumed) for event in events)
        assert cluster.jobs()["1"]["starts"] == 2


@pytest.mark.long
def test_a_job_grows_when_it_is_alone_shrinks_for_another_one_and_is_adopted_by_the_next_daemon(tmp_path):
    training(tmp_path)
    with real_cluster(tmp_path, "--workers", "2") as cluster:
        cluster.mh("submit", "--most", "2", "train.py", "500", "0.4")
        first = cluster.up()
        cluster.until(lambda: cluster.jobs()["1"]["workers"] == 2, "more workers")
        assert "1 -> 2 workers: " in cluster.mh("queue", "--why", "1")
        first.kill()
        first.wait()
        pid = run_pid(cluster, "1")
        cluster.up()
        cluster.mh("submit", "--most", "1", "train.py", "20", "0.1")
        cluster.until(lambda: cluster.jobs()["2"]["state"] == "done", "the short job")
        assert run_pid(cluster, "1") == pid, "the run that was there continues"
        assert cluster.jobs()["1"]["starts"] == 1
        cluster.mh("cancel", "1")
        cluster.until(lambda: cluster.jobs()["1"]["state"] == "cancelled", "the end of the long job")
        assert not is_locked(cluster.queue.jobs / "1" / "alive")
