"""A cluster as TF_CONFIG describes it: every server and every worker on another host, none shares memory."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from manyhands.native import why_not
from tests.parameter_server.conftest import TRAINING
from tests.parameter_server.runs.test_served_runs import faults

pytestmark = [
    pytest.mark.long,
    pytest.mark.faults,
    pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}"),
]

MH = [sys.executable, "-m", "manyhands.cli.main", "run", "--strategy", "parameter_server", "--ui", "plain"]


def free_addresses(number: int) -> list[str]:
    probes = [socket.socket() for _ in range(number)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
    for probe in probes:
        probe.close()
    return addresses


def start(folder: Path, cluster: dict[str, list[str]], job: str, index: int, asked: Any) -> subprocess.Popen[bytes]:
    environ = {**os.environ, "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})}
    with open(folder / f"{job}-{index}.txt", "w") as output:
        return subprocess.Popen(
            [*MH, "--run-dir", "run", str(TRAINING), json.dumps(asked)], cwd=folder, env=environ,
            stdout=output, stderr=output,
        )  # fmt: skip


def wait_for_steps(steps_file: Path, number: int) -> None:
    deadline = time.monotonic() + 150
    while not (steps_file.exists() and steps_file.read_text().count("\n") >= number):
        assert time.monotonic() < deadline, f"{number} steps"
        time.sleep(0.02)


def result_of(folder: Path, tasks: list[tuple[str, int]], codes: list[int]) -> Any:
    """What the worker that trains as the chief printed, where all have ended well."""
    outputs = [(folder / f"{job}-{index}.txt").read_text() for job, index in tasks]
    assert codes == [0] * len(tasks), "\n".join(outputs)
    [line] = [line for output in outputs for line in output.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def test_two_ps_tasks_and_two_workers_end_where_one_process_ends_under_kills(tmp_path: Path, mirrored: Any) -> None:
    chief, *others = free_addresses(5)
    cluster = {"chief": [chief], "worker": others[:2], "ps": others[2:]}
    places = faults(
        ("server 1", 3, "giving a frame"), ("worker 1", 4, "between frames"), ("server 0", 10, "after commit")
    )
    asked = {"mode": "sync", "exact": True, "rows": True, "save_every": 10, "faults": places}
    tasks = [(job, index) for job, addresses in cluster.items() for index in range(len(addresses))]
    processes = [start(tmp_path, cluster, job, index, asked) for job, index in tasks]
    try:
        codes = [process.wait(240) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert result_of(tmp_path, tasks, codes) == mirrored(exact=True, rows=True)
    assert len(list(tmp_path.glob("fault-*"))) == len(places)


@pytest.mark.parametrize("durability", ["wal", "replica"])
def test_with_logs_nothing_is_lost_with_all_agents_at_once(tmp_path: Path, mirrored: Any, durability: str) -> None:
    chief, *others = free_addresses(5)
    cluster = {"chief": [chief], "worker": others[:2], "ps": others[2:]}
    tasks = [(job, index) for job, addresses in cluster.items() for index in range(len(addresses))]
    asked = {"mode": "sync", "exact": True, "rows": True, "save_every": 10, "settings": {"durability": durability}}
    steps_file, slowly = tmp_path / "steps.jsonl", {"slow_s": {"worker 0": 0.05, "worker 1": 0.05}}
    processes = [start(tmp_path, cluster, job, index, {**asked, **slowly}) for job, index in tasks]
    try:
        wait_for_steps(steps_file, 15)
        for process in processes:
            process.kill()
        for process in processes:
            process.wait(60)
        before = steps_file.read_text().splitlines()
        processes = [start(tmp_path, cluster, job, index, asked) for job, index in tasks]
        codes = [process.wait(150) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert result_of(tmp_path, tasks, codes) == mirrored(exact=True, rows=True)
    since = steps_file.read_text().splitlines()[len(before) :]
    at = json.loads(since[0])["step"] - 1
    assert at >= 10 and since[: len(before) - at] == before[at:]


def test_training_begins_with_the_worker_that_is_there_and_the_other_one_joins(tmp_path: Path) -> None:
    chief, *others = free_addresses(4)
    cluster = {"chief": [chief], "worker": others[:2], "ps": others[2:]}
    asked = {"mode": "async", "slow_s": {"worker 0": 0.05}, "epochs": 1000}
    processes = [start(tmp_path, cluster, job, 0, asked) for job in ("chief", "ps", "worker")]
    try:
        await_text(tmp_path / "steps.jsonl", '"step": 3')
        processes.append(start(tmp_path, cluster, "worker", 1, asked))
        await_text(tmp_path / "chief-0.txt", "1 joined")
        processes[0].terminate()
        codes = [process.wait(120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [75] * 4


def await_text(path: Path, text: str, deadline_s: float = 120.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, f"{text} in {path.name}"
        time.sleep(0.05)
