"""Whole runs of the command line, disturbed in various ways, against the undisturbed one: bit for bit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from manyhands.checkpoint import newest_valid
from manyhands.events import Event, Resumed, StepDone
from manyhands.observe.recorder import read_events
from manyhands.observe.run_status import look_at

SCRIPT = Path(__file__).with_name("small_training.py")
MH = [sys.executable, "-m", "manyhands.cli.main"]

pytestmark = pytest.mark.slow


class Job:
    """One `mh run` of the small training, in the directory `name`; it does not begin step `hold` before `let_go`."""

    def __init__(
        self, folder: Path, name: str, workers: int, *words: str, flags: tuple[str, ...] = (), hold: int = 0
    ) -> None:
        self.run_dir = folder / name
        self._hold = folder / f"{name}.hold"
        if hold:
            self._hold.touch()
            words += ("--hold", str(hold), "--while-there", str(self._hold))
        self._process = subprocess.Popen(
            [*MH, "run", "-n", str(workers), "--run-dir", name, *flags, str(SCRIPT), *words],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.pid = self._process.pid

    def let_go(self) -> None:
        self._hold.unlink()

    def events(self, kind: type[Event]) -> list[Event]:
        path = self.run_dir / "events" / "chief.jsonl"
        return [event for event in read_events(path) if isinstance(event, kind)] if path.exists() else []

    def wait_for_step(self, step: int, deadline_s: float = 100.0) -> None:
        deadline = time.monotonic() + deadline_s
        while not any(event.step >= step for event in self.events(StepDone)):
            assert time.monotonic() < deadline, f"step {step} was not reached"
            assert self._process.poll() is None, self._process.communicate()
            time.sleep(0.02)

    def workers(self) -> list[psutil.Process]:
        children = psutil.Process(self.pid).children(recursive=True)
        return sorted(
            (p for p in children if "manyhands.launcher.worker_process.bootstrap" in p.cmdline()), key=lambda p: p.pid
        )

    def end(self, deadline_s: float = 100.0) -> tuple[int, str, str]:
        out, err = self._process.communicate(timeout=deadline_s)
        return self._process.returncode, out, err


def digest(output: str) -> str:
    found = re.search(r"weights (\w+)", output)
    assert found, output
    return found.group(1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, once: Any) -> str:
    def train() -> str:
        code, out, err = Job(tmp_path_factory.mktemp("undisturbed"), "run", 1).end()
        assert code == 0, err
        return digest(out)

    return str(once("small-training", train))


@pytest.mark.faults
def test_a_worker_killed_mid_run_changes_nothing_in_the_result(tmp_path: Path, undisturbed: str) -> None:
    job = Job(tmp_path, "killed", 2, "--pause", "0.05", flags=("--timeout", "300"), hold=12)
    job.wait_for_step(7)
    victim = job.workers()[-1]
    victim.send_signal(signal.SIGKILL)
    job.let_go()
    code, out, err = job.end()
    assert code == 0, err
    assert digest(out) == undisturbed
    [resumed] = [event.step for event in job.events(Resumed)]
    assert resumed in (5, 10), "the last checkpoint before the kill, whichever step that came at"
    assert "SIGKILL" in err and f"restarting from step {resumed}" in err


def test_a_run_stopped_by_sigterm_resumes_with_other_workers_to_the_same_bits(tmp_path: Path, undisturbed: str) -> None:
    job = Job(tmp_path, "stopped", 2, hold=8)
    job.wait_for_step(3)
    os.kill(job.pid, signal.SIGTERM)
    code, out, err = job.end()
    assert code == 75, err
    assert "weights" not in out
    *_, ended, resume = err.splitlines()
    assert ended.startswith("ended with exit code 75 at step") and resume.startswith("resume: mh run "), err
    again = Job(tmp_path, "stopped", 3, flags=("-v",))
    code, out, err = again.end()
    assert code == 0, err
    assert digest(out) == undisturbed
    steps = [event.step for event in again.events(StepDone)]
    assert steps == list(range(1, 13)), "every step was done once over both lives"
    assert [used.rank for used in look_at(again.run_dir).used] == [0, 1, 2]
    assert re.findall(r"used by rank (\d): \d\.\d\d cores", err) == ["0", "1", "2"]


@pytest.mark.long
@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_every_process_and_its_loaders_ends_with_a_checkpoint(tmp_path: Path, number: int) -> None:
    job = Job(tmp_path, "run", 2, "--loaders", "1", "--steps", "40", hold=8)
    job.wait_for_step(7)
    everyone = [*psutil.Process(job.pid).children(recursive=True), psutil.Process(job.pid)]
    assert len(everyone) >= 7, "launcher, guard, coordinator, two workers with a loader each"
    for process in everyone:
        process.send_signal(number)
    code, _, err = job.end()
    assert code == 75, err
    assert newest_valid(job.run_dir / "checkpoints") is not None


def test_a_directory_in_use_or_finished_ends_with_2_and_overwrite_starts_over(tmp_path: Path, undisturbed: str) -> None:
    job = Job(tmp_path, "busy", 1, hold=2)
    job.wait_for_step(1)
    code, _, err = Job(tmp_path, "busy", 1).end()
    assert code == 2
    assert f"pid {job.pid}" in err
    job.let_go()
    assert job.end()[0] == 0
    code, _, err = Job(tmp_path, "busy", 1).end()
    assert code == 2
    assert "--overwrite" in err
    code, out, err = Job(tmp_path, "busy", 1, flags=("--overwrite",)).end()
    assert code == 0, err
    assert digest(out) == undisturbed


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("NOT SHOWN HERE: a full disk needs root, to mount a small tmpfs")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.faults
def test_a_disk_that_fills_up_costs_checkpoints_and_the_run_resumes_once_there_is_room(
    small_disk: Path, undisturbed: str
) -> None:
    job = Job(small_disk, "full", 2, "--every-steps", "2", hold=8)
    job.wait_for_step(1)
    with contextlib.suppress(OSError), open(small_disk / "ballast", "wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(1024))
    job.let_go()
    code, _, err = job.end()
    assert code == 3, "the last one was asked for, and is not there"
    assert "epoch 3 done at step 12" in err, "training went on"
    assert "not saved" in err and "needed" in err
    (small_disk / "ballast").unlink(missing_ok=True)
    code, out, err = Job(small_disk, "full", 1).end()
    assert code == 0, err
    assert digest(out) == undisturbed
    assert newest_valid(small_disk / "full" / "checkpoints") is not None
    assert not list((small_disk / "full" / "checkpoints").glob("*.tmp-*"))
