"""Whole runs of workers that train locally and push now and then: under kill -9, every push counts once."""

from __future__ import annotations

import json
import os
import signal

import pytest

from manyhands.data.sample_order import order
from manyhands.events import RoundsClosed, StepDone
from manyhands.native import why_not
from manyhands.observe.run_audit import audit_run, read_run_events
from tests.elastic.conftest import Run
from tests.parameter_server.conftest import Start, steps_of
from tests.parameter_server.runs.test_served_runs import faults

ROWS = 256  # of training.py, which is no module to import

pytestmark = [
    pytest.mark.slow,
    pytest.mark.faults,
    pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}"),
]


def pushes_of(run: Run) -> dict[int, float]:
    """By range of local steps, what was pushed of it last: once it was applied, no worker is leased it again."""
    lines = (run.folder / "pushes.jsonl").read_text().splitlines()
    return {push["step"]: push["added"] for push in map(json.loads, lines)}


@pytest.mark.long
def test_downpour_counts_every_gradient_once_under_kills(served: Start) -> None:
    places = faults(("worker 1", 8, "half-way through the push"), ("server 0", 8, "before commit"))
    asked = {"mode": "async", "settings": {"push_every": 3, "pull_every": 2}, "fits": 3, "epochs": 1, "save_every": 10}
    run = served({**asked, "faults": places}, "-n", "2", "--servers", "2")
    result = run.wait()
    assert result["counter"] == [3.0] and result["reached"] == 48
    assert len(list(run.folder.glob("fault-*"))) == len(places), "not every fault has happened"
    assert not audit_run(run.directory).problems


@pytest.mark.long
def test_a_round_closes_without_a_late_worker_and_a_dead_one_and_every_batch_counts_once(served: Start) -> None:
    """A batch adds 1 to its cells, and of k workers' mean that is 1 / k: the record says what k was."""
    places = faults(("worker 1", 5, "backward"), ("server 0", 6, "after commit"))
    way = {"every": 2, "quorum": 2, "deadline_s": 0.2}
    asked = {"mode": "local_sgd", "settings": way, "epochs": 2, "record": True, "slow_s": {"worker 2": 0.6}}
    run = served({**asked, "faults": places}, "-n", "3", "--servers", "1")
    result = run.wait()
    assert len(list(run.folder.glob("fault-*"))) == len(places), "not every fault has happened"
    events = read_run_events(run.directory)
    steps = {event.step: event for event in events if isinstance(event, StepDone)}
    assert sorted(steps) == list(range(1, 33))
    cells = [0.0] * ROWS
    for event in steps.values():
        assert event.start is not None and event.together is not None
        for row in order(ROWS, 0, event.start[0], event.start[1], event.start[1] + event.rows):
            cells[row] += 1 / event.together
    assert result["cells"] == pytest.approx(cells, abs=1e-4)
    assert max(event.staleness or 0 for event in steps.values()) >= 2, "no worker was late"
    assert len({event.together for event in steps.values()}) > 1
    [closed] = [event.rounds for event in events if isinstance(event, RoundsClosed)]
    assert sum(workers * rounds for workers, rounds in closed.items()) == 16
    assert not audit_run(run.directory).problems


def stopped_at(run: Run) -> int:
    """Let it take some steps, and ask it to stop: the step that it has saved."""
    run.until(lambda: (run.folder / "steps.jsonl").exists() and len(steps_of(run)) > 5, "five steps")
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.process.wait(100) == 75
    return int(steps_of(run)[-1]["step"])


@pytest.mark.long
def test_an_exchange_of_asynchronous_easgd_moves_the_center_once_under_kills_and_after_a_resume(
    served: Start,
) -> None:
    way = {"every": 2, "outer": "elastic", "asynchronous": True}
    asked = {"mode": "local_sgd", "settings": way, "epochs": 3, "save_every": 20, "record": True}
    reached = stopped_at(served({**asked, "waits": {"hold": 8}}, "-n", "1", "--servers", "1", folder="run"))
    assert reached < 30
    places = faults(
        ("worker 1", reached + 4, "before the push"),
        ("server 0", reached // 2 + 3, "before commit"),
        ("worker 0", reached + 12, "after the push"),
    )
    run = served({**asked, "faults": places}, "-n", "2", "--servers", "1", folder="run")
    result = run.wait()
    assert result["reached"] == 48
    assert len(list(run.folder.glob("fault-*"))) == len(places), "not every fault has happened"
    pushes = pushes_of(run)
    assert sorted(pushes) == list(range(1, len(pushes) + 1))
    noticed = [
        one for one in pushes.values() if abs(one) > 0.1
    ]  # the order of exchanges decides how much their weights differ
    assert len(noticed) > 0.8 * len(pushes), "one more or less would not be noticed"
    assert sum(result["cells"]) == pytest.approx(sum(pushes.values()), abs=0.01)
    assert not audit_run(run.directory).problems
