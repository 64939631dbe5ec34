"""The demo, as `make demo` runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.cli.start.demo import FaultyDisplay, _text
from manyhands.events import Event, StepDone, WorkerStarted


@pytest.mark.long
@pytest.mark.faults
def test_the_demo_loses_a_worker_stops_resumes_and_learns_digits(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "manyhands.cli.main", "demo", "--run-dir", "demo", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["accuracy"] >= 0.97 and report["examples_evaluated"] == 360
    assert report["workers"][0] == 2 and report["workers"][-1] == 1
    assert report["problems"] == [] and report["steps"] == 345 and report["steps_done_twice"] == 0
    killed = report["killed"]
    assert "SIGKILL" in killed["reason"] and killed["went_on_after_s"] >= 0
    assert 103 < killed["next_step"] <= report["stopped_and_resumed_at"]
    assert f"step {killed['next_step']} was committed without that worker" in _text(report)


class Shown:
    def __init__(self) -> None:
        self.said: list[str] = []

    def event(self, event: Event) -> None: ...

    def output(self, rank: int, stream: str, data: bytes) -> None: ...

    def say(self, line: str) -> None:
        self.said.append(line)

    def failure(self, block: object) -> None: ...

    def close(self) -> None: ...


def test_the_demo_kills_one_worker_and_stops_the_run_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    shown = Shown()
    display = FaultyDisplay(shown, quiet=True)
    for slot, pid in ((0, 40), (1, 41)):
        display.event(WorkerStarted(slot=slot, incarnation=slot, host="a", pid=pid))
    for number in range(1, 101):
        display.event(StepDone(step=number, epoch=0, loss=1.0, rows=1, samples_per_s=1.0, phases={}, total_steps=100))
    assert sent == [(41, signal.SIGKILL), (os.getpid(), signal.SIGTERM)]
    assert shown.said == ["2. kill -9 41: one worker is dead. The other continues, and a replacement starts."]
    assert display.has_stopped
