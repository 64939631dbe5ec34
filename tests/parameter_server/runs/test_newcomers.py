"""Workers that join runs with servers during a collective of the others: all end with the same state."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.control.session.run_client import request_scale
from manyhands.native import why_not
from tests.parameter_server.conftest import Start, steps_of
from tests.parameter_server.runs.test_served_runs import faults

pytestmark = [
    pytest.mark.slow,
    pytest.mark.faults,
    pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}"),
]


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_worker_that_comes_while_the_others_evaluate_an_epoch_evaluates_it_too(served: Start, mirrored: Any) -> None:
    places = faults(
        ("worker 2", 8, "backward"),
        ("worker 1", 16, "in evaluation"),
        ("worker 0", 16, "in evaluation"),
    )
    places[1] |= {"late": True}
    places[2] |= {"late": True, "lives": True}
    asked = {"exact": True, "validate": True}
    run = served({**asked, "mode": "sync", "faults": places}, "-n", "3", "--servers", "1")
    run.until(lambda: "1 joined" in run.output(), "another worker", 120.0)
    (run.folder / "continue").touch()
    assert run.wait(timeout_s=120.0) == mirrored(**asked)
    assert len(list(run.folder.glob("fault-*"))) == len(places), "not every fault has happened"
    assert [one["step"] for one in steps_of(run)] == list(range(1, 33)), "a step was taken again"


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_server_that_was_wanted_and_is_not_any_more_is_not_waited_for(served: Start, mirrored: Any) -> None:
    asked = {"exact": True, "epochs": 4}
    slow = {"worker 0": 0.02, "worker 1": 0.02}
    run = served({**asked, "mode": "sync", "save_every": 4, "slow_s": slow}, "-n", "2", "--servers", "1")
    run.until(lambda: (run.folder / "steps.jsonl").exists(), "a step")
    request_scale(run.directory, None, 3)
    run.until(lambda: any(one.phase == "opening an interval" for one in run.members()), "an interval of three servers")
    request_scale(run.directory, None, 1)
    assert run.wait(timeout_s=60.0) == mirrored(**asked)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_worker_that_alone_has_lost_another_at_the_beginning_of_an_interval_is_not_waited_for(
    served: Start, mirrored: Any
) -> None:
    places = [{"who": "worker 1", "step": 4, "at": "when all have opened", "loses": 2}]
    asked = {"exact": True, "validate": True}
    options = ("-n", "3", "--servers", "1", "--plane", "gloo")
    run = served({**asked, "mode": "sync", "save_every": 4, "faults": places}, *options)
    assert run.wait(timeout_s=60.0) == mirrored(**asked)
    assert len(list(run.folder.glob("fault-*"))) == len(places), "not every fault has happened"
