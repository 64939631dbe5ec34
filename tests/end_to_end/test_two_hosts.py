"""Two hosts train together; strangers do not get in. The hosts are network namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from manyhands.events import StepDone
from manyhands.observe.recorder import read_events
from tests.end_to_end.namespaces import ADDRESSES, two_hosts, why_not
from tests.end_to_end.test_runs import MH, SCRIPT, digest
from tests.end_to_end.test_runs import undisturbed as undisturbed

REASON = why_not()

pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[list[str], list[str]]]:
    with two_hosts() as prefixes:
        yield prefixes


def start(prefix: list[str], *words: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([*prefix, *words], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path, deadline_s: float = 100.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)


def lead(
    prefix: list[str], cwd: Path, name: str, *words: str, workers: int = 1, steps: int = 12
) -> subprocess.Popen[str]:
    return start(
        prefix, *MH, "run", "-n", str(workers), "--run-dir", name, "--hosts-wanted", "2", "--listen", ADDRESSES[0],
        "--join-file", f"{name}.join", *words, str(SCRIPT), "--strategy", "", "--pause", "0.05",
        "--steps", str(steps), cwd=cwd,
    )  # fmt: skip


@contextlib.contextmanager
def two_workers_on_each(
    hosts: tuple[list[str], list[str]], cwd: Path, name: str, *words: str, steps: int = 12
) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    first = lead(hosts[0], cwd, name, "--insecure-data-plane", *words, workers=2, steps=steps)
    started = [first]
    try:
        wait_for(cwd / f"{name}.join")
        started.append(start(hosts[1], *MH, "agent", "--join", f"{name}.join", "-n", "2", cwd=cwd))
        yield first, started[1]
    finally:
        for process in started:
            process.kill()  # no error if it has ended
            process.communicate(timeout=100)


# Sums travel in many buckets, also those of a small model.
SMALL_BUCKETS = ("--bucket-bytes", "1024")


@pytest.mark.long
def test_two_workers_on_each_of_two_hosts_end_where_one_process_ends(
    hosts: tuple[list[str], list[str]], tmp_path: Path, undisturbed: str
) -> None:
    with two_workers_on_each(hosts, tmp_path, "four", *SMALL_BUCKETS) as (first, second):
        out, err = first.communicate(timeout=100)
        _, err_of_second = second.communicate(timeout=100)
    assert first.returncode == second.returncode == 0, err + err_of_second
    assert "4 workers" in err
    assert digest(out) == undisturbed


def wait_for_step(run_dir: Path, step: int, deadline_s: float = 100.0) -> None:
    path, deadline = run_dir / "events" / "chief.jsonl", time.monotonic() + deadline_s
    while not path.exists() or not any(
        event.step >= step for event in read_events(path) if isinstance(event, StepDone)
    ):
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.02)


def workers_of(agent: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(agent.pid).children(recursive=True)
    return sorted(
        (p for p in children if "manyhands.launcher.worker_process.bootstrap" in p.cmdline()), key=lambda p: p.pid
    )


@pytest.mark.long
@pytest.mark.faults
@pytest.mark.parametrize("reducer", ["exact", "int8"])
def test_a_worker_killed_on_the_other_host_ends_the_run_by_name_and_nothing_is_left(
    hosts: tuple[list[str], list[str]], tmp_path: Path, reducer: str
) -> None:
    words = ("--max-restarts", "0", "--reducer", reducer, *(() if reducer == "exact" else ("--no-exact",)))
    with two_workers_on_each(hosts, tmp_path, "killed", *SMALL_BUCKETS, *words, steps=100_000) as (first, second):
        wait_for_step(tmp_path / "killed", 3)
        family = [p for agent in (first, second) for p in psutil.Process(agent.pid).children(recursive=True)]
        victim = workers_of(second)[-1]
        os.kill(victim.pid, signal.SIGKILL)
        _, err = first.communicate(timeout=100)
        second.communicate(timeout=100)
    assert first.returncode == second.returncode == 4, err
    assert re.search(r"first failure +rank [23] on .*SIGKILL", err), err
    _, alive = psutil.wait_procs(family, timeout=100)
    assert not alive, alive


def test_without_asking_for_the_insecure_data_plane_nothing_starts(
    hosts: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    refused = lead(hosts[0], tmp_path, "closed")
    _, err = refused.communicate(timeout=100)
    assert refused.returncode == 3
    assert "--insecure-data-plane" in err


@pytest.mark.faults
def test_two_hosts_end_where_one_process_ends_and_strangers_are_refused_and_reported_once(
    hosts: tuple[list[str], list[str]], tmp_path: Path, undisturbed: str
) -> None:
    first = lead(hosts[0], tmp_path, "guarded", "--insecure-data-plane")
    wait_for(tmp_path / "guarded.join")
    assert (tmp_path / "guarded.join").stat().st_mode & 0o777 == 0o600
    ticket = json.loads((tmp_path / "guarded.join").read_text())
    for name, key in (("wrong", "ab" * 32), ("other", "17" * 32)):
        (tmp_path / f"{name}.join").write_text(json.dumps({**ticket, "key": key}))
        (tmp_path / f"{name}.join").chmod(0o600)
    for name in ("wrong", "other"):
        stranger = start(hosts[1], *MH, "agent", "--join", f"{name}.join", cwd=tmp_path)
        _, err = stranger.communicate(timeout=100)
        assert stranger.returncode == 3, err
    keyless = subprocess.run([*hosts[1], sys.executable, "-c", KEYLESS, ticket["address"]], timeout=100)
    assert keyless.returncode == 0
    second = start(hosts[1], *MH, "agent", "--join", "guarded.join", cwd=tmp_path)
    out, err = first.communicate(timeout=100)
    second.communicate(timeout=100)
    assert first.returncode == second.returncode == 0, err
    assert digest(out) == undisturbed
    assert "2 workers" in err
    assert re.search(r"unencrypted|insecure", err), "the first lines say that tensors are not encrypted"
    refusals = [line.partition("refused a join from ")[2] for line in err.splitlines() if "refused a join" in line]
    assert f"{ADDRESSES[1]}: a wrong key, or another run's" in refusals, err
    assert any("no key" in refusal for refusal in refusals), err
    assert len(refusals) == len(set(refusals)), "each is reported once"
    assert ticket["key"] not in out + err


# A client that speaks ZeroMQ without any key: it must get no answer at all.
KEYLESS = """
import sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.linger = 0
socket.connect("tcp://" + sys.argv[1])
socket.send(b"hello")
sys.exit(1 if socket.poll(1000) else 0)
"""
