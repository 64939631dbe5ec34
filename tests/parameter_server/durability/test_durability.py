"""What is lost with whom, by durability: servers and whole hosts are killed -9, and every gradient counts once."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest

from manyhands.control.session.run_client import query
from manyhands.native import why_not
from tests.elastic.conftest import Run
from tests.parameter_server.conftest import Start, steps_of
from tests.parameter_server.runs.test_served_runs import TWO_AND_TWO, faults

pytestmark = [
    pytest.mark.slow,
    pytest.mark.faults,
    pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}"),
]

MODES = ["async", pytest.param("sync", marks=pytest.mark.long)]
LOGGED = [("async", "wal"), ("sync", "wal"), ("async", "replica"), ("sync", "replica")]
SLOWLY = {"slow_s": {"worker 0": 0.03, "worker 1": 0.03}}


def lose_host(run: Run, after: int) -> list[dict[str, Any]]:
    """Kill the agent -9, and with it all processes; returns the updates that the chief had received until then."""
    run.until(lambda: (run.folder / "steps.jsonl").exists() and len(steps_of(run)) >= after, f"{after} steps")
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait(60)
    return steps_of(run)


@pytest.mark.long
@pytest.mark.parametrize(("mode", "durability"), LOGGED)
def test_with_a_log_nothing_is_lost_with_the_agent(served: Start, mirrored: Any, mode: str, durability: str) -> None:
    places = faults(("server 1", 12, "before commit"), ("server 0", 24, "between tables and weights"))
    asked = {"mode": mode, "rows": True, "settings": {"durability": durability}, "save_every": 10, "faults": places}
    slowly = {"exact": mode == "sync", **SLOWLY, "waits": {"hold": 18}}
    before = lose_host(served({**asked, **slowly}, *TWO_AND_TWO, folder="run"), after=14)
    again = served({**asked, "exact": mode == "sync"}, *TWO_AND_TWO, folder="run")
    result = again.wait()
    assert result["counter"] == [2.0] and result["reached"] == 32
    since, saved = steps_of(again)[len(before) :], (len(before) - 1) // 10 * 10
    assert since[0]["step"] in (saved + 1, saved - 9), "it did not resume from the checkpoint"
    assert since[: len(before) - since[0]["step"] + 1] == before[since[0]["step"] - 1 :], "it was computed again"
    if mode == "sync":
        assert result == mirrored(rows=True, exact=True)
    assert len(list(again.folder.glob("fault-*"))) == len(places)
    assert not (again.directory / "updates").exists(), "a log is left that no checkpoint needs"


@pytest.mark.long
def test_with_a_log_nothing_is_lost_with_all_workers_either(served: Start) -> None:
    asked = {"mode": "ssp", "rows": True, "settings": {"durability": "wal"}, **SLOWLY, "waits": {"hold": 18}}
    run = served(asked, *TWO_AND_TWO)
    run.until(lambda: (run.folder / "steps.jsonl").exists() and len(steps_of(run)) >= 10, "10 steps")
    for worker in query(run.directory).members:
        os.kill(worker.pid, signal.SIGKILL)
    (run.folder / "continue").touch()
    assert run.wait()["counter"] == [2.0]
    steps = steps_of(run)
    again = [one["step"] for one in steps].index(1, 1)
    assert again >= 10 and steps[again : 2 * again] == steps[:again]


@pytest.mark.long
def test_by_default_a_host_takes_along_what_came_after_the_checkpoint(served: Start) -> None:
    asked = {"mode": "async", "rows": True, "epochs": 3, "save_every": 20}
    before = lose_host(served({**asked, **SLOWLY, "waits": {"hold": 34}}, *TWO_AND_TWO, folder="run"), after=28)
    again = served(asked, *TWO_AND_TWO, folder="run")
    assert again.wait()["counter"] == [3.0]
    since = steps_of(again)[len(before) :]
    assert [one["step"] for one in since] == list(range(21, 49))
    assert since[: len(before) - 20] != before[20:], "so it was not computed again"


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_with_one_copy_of_the_states_a_server_takes_the_run_back_to_the_checkpoint(
    served: Start, mirrored: Any, mode: str
) -> None:
    places = faults(("server 1", 8, "after commit"), ("server 0", 30, "before commit"))
    asked = {"mode": mode, "rows": True, "settings": {"durability": "snapshot"}, "save_every": 20, "faults": places}
    run = served({**asked, "exact": mode == "sync"}, "-n", "1", "--servers", "2")
    result = run.wait()
    assert result["counter"] == [2.0] and result["reached"] == 32
    steps = [one["step"] for one in steps_of(run)]
    assert steps[: steps.index(21)] == list(range(1, 21)), "a server that died between two updates took something along"
    again = len(steps) - 1 - steps[::-1].index(21)
    assert steps[again:] == list(range(21, 33)) and steps[20:again] == list(range(21, 21 + again - 20))
    assert re.search(r"lost in the middle of update 30, .* the checkpoint of step 20: 9 updates", run.output())
    if mode == "sync":
        assert result == mirrored(rows=True, exact=True)
