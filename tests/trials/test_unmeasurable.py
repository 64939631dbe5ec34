"""For a script that cannot be measured: its own error without paths that are gone, or what to write instead."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from manyhands.control.messages.failure import Failure, WorkerEnd
from manyhands.control.messages.launch_request import WorkerCommand
from manyhands.errors import TrainingFailed
from manyhands.planner.measure.plan_request import ask_script
from manyhands.profiling.verdict import Way
from manyhands.trials.bottleneck_search import NO_STEP, Profiling, TrialTimes, _Runner, _Search
from manyhands.trials.trial_process import Failed, _ReportingDisplay


def test_a_failure_in_a_trial_names_no_log_that_is_deleted_with_it() -> None:
    log = "/tmp/manyhands-trial-x/run/rank-0.err"
    first = WorkerEnd(
        rank=0, host="a", pid=7, kind="exception", error="RuntimeError", message="boom", traceback="boom", log=log
    )
    block = Failure(
        run="run", exit_code=1, reason="no restarts", attempt=1, max_attempts=1, step=None, first=first, certain=True,
        resume="mh run train.py",
    )  # fmt: skip
    reading, writing = os.pipe()
    with open(reading, "rb") as pipe:
        _ReportingDisplay(writing).failure(block)
        os.close(writing)
        failed = msgspec.json.decode(pipe.read(), type=Failed)
    assert failed.reason == "RuntimeError: boom"
    assert failed.details.startswith("run in a trial failed (attempt 1 of 1): no restarts") and "boom" in failed.details
    assert "manyhands-trial" not in failed.details and "resume" not in failed.details


def test_a_script_that_trains_without_manyhands_sees_how_it_can(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("print('trained by something else')")
    command = WorkerCommand("script", str(script), [])
    with pytest.raises(TrainingFailed) as raised:
        ask_script(command, lambda path: {}, 100.0, "did not call its model in a way that manyhands sees")
    never = _Runner(Profiling(command=command)).error(TrialTimes(0.0, [], NO_STEP))
    for text in (str(raised.value), str(never)):
        assert "mh.Trainer" in text and "mh.join()" in text and "scope(): around a Keras model" in text
    assert "--wait" not in str(never), "waiting longer would not help"
    # What torch.distributed.init_process_group("gloo") raises, where no launcher has set RANK.
    script.write_text("raise ValueError('Error initializing torch.distributed using env:// rendezvous: RANK')")
    with pytest.raises(TrainingFailed, match="for a loop of your own or DDP's"):
        ask_script(command, lambda path: {}, 100.0, "did not call fit")
    script.write_text("raise RuntimeError('boom')")
    with pytest.raises(TrainingFailed, match="RuntimeError: boom") as raised:
        ask_script(command, lambda path: {}, 100.0, "did not call fit")
    assert "mh.join" not in str(raised.value), "its own error says what is wrong"


class Ended:
    """A runner whose script has 25 steps, of which 22 are measured."""

    def __init__(self) -> None:
        self.steps, self.facts = 1501, None

    def run(self, way: Way) -> TrialTimes:
        return TrialTimes(0.001, [], steps=22)


def test_a_trial_that_ends_before_its_steps_shows_how_many_there_are() -> None:
    runner: Any = Ended()
    _Search(runner, 1, lambda line: None, {}).try_again([])
    assert runner.steps == 22, "the report says how many a trial has measured"
