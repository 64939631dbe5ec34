"""Slices that move between the workers of an elastic run, one of which is killed: the result stays the same."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from manyhands.events import Divided, Event, GenerationStarted, Straggler, WorkerStarted
from manyhands.observe.recorder import read_events

SCRIPT = Path(__file__).with_name("unequal_training.py")
STEPS = 60

pytestmark = [pytest.mark.long, pytest.mark.faults]


def start(folder: Path, name: str, workers: int, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "manyhands.cli.main", "run", "-n", str(workers), "--run-dir", name, *flags]
    return subprocess.Popen(
        [*command, str(SCRIPT), str(STEPS)], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    found = re.search(r"weights (\w+)", out)
    assert found, out
    return found.group(1), err


def events(folder: Path, name: str) -> list[Event]:
    paths = sorted((folder / name / "events").glob("*.jsonl"))
    return sorted((event for path in paths for event in read_events(path)), key=lambda event: event.time_s)


def wait_for_division(folder: Path, name: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 100
    while not any(isinstance(event, Divided) for event in events(folder, name)):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.05)


def test_slices_move_in_an_elastic_run_and_again_after_a_worker_was_killed(tmp_path: Path) -> None:
    alone, _ = end(start(tmp_path, "alone", 1))
    process = start(tmp_path, "elastic", 3, "--elastic", "2:3", "--balance", "--straggler-steps", "5")
    wait_for_division(tmp_path, "elastic", process)
    started = [event for event in events(tmp_path, "elastic") if isinstance(event, WorkerStarted)]
    os.kill(next(event.pid for event in started if event.slot == 2), signal.SIGKILL)
    balanced, err = end(process)
    assert balanced == alone
    seen = events(tmp_path, "elastic")
    lost = next(event for event in seen if isinstance(event, GenerationStarted) and "died" in event.why)
    divided = [event for event in seen if isinstance(event, Divided)]
    before = [event.slices for event in divided if event.time_s < lost.time_s]
    after = [event.slices for event in divided if event.time_s > lost.time_s]
    assert before and after
    assert all(sum(slices) == 12 and min(slices) >= 1 for slices in (*before, *after))
    assert before[0][1] < 4, "the slow worker had a third of them"
    assert any(isinstance(event, Straggler) and event.phase == "forward" for event in seen)
    assert "times as slow as the others, in forward" in err
