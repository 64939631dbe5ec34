"""The demo, as `make demo` runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.cli.demo import _told


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
    assert f"step {killed['next_step']} was committed without it" in _told(report)
