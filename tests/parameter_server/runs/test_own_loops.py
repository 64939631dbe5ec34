"""User loops under parameter servers: kills raise no exception in them, and every gradient counts once."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manyhands.errors import UsageError
from manyhands.events import StepDone
from manyhands.native import why_not
from manyhands.observe.recorder import read_events
from manyhands.parameter_server.loop.leased_own_loop import refuse_unsynchronised
from tests.docs.test_guide import blocks
from tests.elastic.conftest import Run
from tests.parameter_server.conftest import Start
from tests.parameter_server.runs.test_served_runs import TWO_AND_TWO, faults

pytestmark = [
    pytest.mark.slow,
    pytest.mark.faults,
    pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}"),
]

LOOP = Path(__file__).with_name("own_loop.py")
Loop = Callable[..., Run]


@pytest.fixture
def loop(served: Start) -> Loop:
    """The same runs as `served`, with another script."""
    return functools.partial(served, script=LOOP)


def said(run: Run) -> list[list[dict[str, Any]]]:
    """What each worker said in its loop."""
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in run.folder.glob("said-*.jsonl")]


@pytest.mark.long
def test_a_synchronous_loop_gives_the_bits_of_mirrored_when_workers_and_servers_die(loop: Loop) -> None:
    asked = {"exact": True, "clip": 5.0, "schedule": True, "noisy": True, "epochs": 1, "inside": True}
    alone = loop(asked, "-n", "1")
    places = faults(("server 0", 4, "before commit"), ("worker 1", 6, "backward"))
    run = loop({**asked, "mode": "sync", "loaders": 1, "faults": places}, "-n", "2", "--servers", "1")
    result, expected = run.wait(), alone.wait()
    assert {**result, "workers": [0.0]} == expected
    assert len(list(run.folder.glob("fault-*"))) == len(places), "not every fault has happened"
    lines = [one for worker in said(run) for one in worker]
    assert not any(one.get("is_me") for one in lines), "loader processes read every slice"
    evaluated = {one["inside"]: one["loss"] for one in said(alone)[0] if "inside" in one}
    found = [(one["inside"], one["loss"]) for one in lines if "inside" in one]
    assert len(evaluated) == 16 and found
    assert [step for step, value in found if evaluated[step] != value] == [], "evaluated with other weights"


@pytest.mark.long
@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_every_gradient_of_a_loop_counts_exactly_once(loop: Loop, mode: str) -> None:
    places = faults(
        ("server 0", 5, "before the answer"),
        ("worker 0", 8, "half-way through the push"),
        ("server 1", 12, "after commit"),
    )
    asked = {"mode": mode, "rows": True, "slices": 2, "together": True, "lr": 0.005, "faults": places}
    run = loop(asked, *TWO_AND_TWO)
    result = run.wait()
    assert (result["counter"], result["reached"]) == ([2.0], 32)
    assert len(list(run.folder.glob("fault-*"))) == len(places), "not every fault has happened"
    rates = [event.lr for event in read_events(run.directory / "events" / "chief.jsonl") if isinstance(event, StepDone)]
    assert (rates[0], rates[-1]) == (0.01, 0.005), "servers did not receive the new rate"
    lines = [one for worker in said(run) for one in worker]
    assert {(one["refused"], one["named"]) for one in lines if "refused" in one} == {("gather", True), ("reduce", True)}
    lines = [one for one in lines if "mean" in one]
    assert all(1.0 <= one["mean"] <= 2.0 for one in lines)
    assert any(1.0 < one["mean"] < 2.0 for one in lines), "no worker has received a mean with another's value"


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_loop_that_was_stopped_resumes_from_its_checkpoint_with_others(loop: Loop, mode: str) -> None:
    asked = {"mode": mode, "slices": 2}
    first = loop({**asked, "waits": {"hold": 8}}, "-n", "1", "--servers", "1", folder="run")
    first.until(lambda: said(first) and len(said(first)[0]) > 5, "five steps")
    os.kill(first.process.pid, signal.SIGTERM)
    assert first.process.wait(100) == 75
    again = loop(asked, *TWO_AND_TWO, folder="run")
    result = again.wait()
    assert (result["counter"], result["reached"]) == ([2.0], 32)
    assert "resumed at step" in again.output()


@pytest.mark.long
def test_others_continue_without_a_worker_that_leaves_its_loop_by_break_and_its_error_says_what_to_do(
    loop: Loop,
) -> None:
    run = loop({"mode": "sync", "leaves": True}, *TWO_AND_TWO)
    assert run.process.wait(100) == 2, run.output()
    assert "no other worker trains" not in run.output()
    assert "warning: Rank 1 has left its loop by `break`" in run.output()
    assert re.search(r"evaluate needs all workers.*\n +try: hands.request_stop\(\)", run.output())


@pytest.mark.long  # `make test` runs it with the page that shows it
def test_the_loop_of_the_docs_ends_on_all_workers_when_one_asks_for_it(tmp_path: Path) -> None:
    [example] = [block for block in blocks("docs/parameter-servers.md") if "mh.join" in block]
    (tmp_path / "loop.py").write_text(example)
    ended = subprocess.run(
        [sys.executable, "loop.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = re.search(r"^(\d+) steps, loss 0\.", ended.stdout, re.M)
    assert found, ended.stdout
    assert 1 < int(found[1]) < 320


def test_what_needs_all_workers_is_refused_where_they_are_not_together() -> None:
    refuse_unsynchronised("gather", in_loop=False, was_left=False)
    with pytest.raises(UsageError, match=r"gather needs all workers.*\n.*hands.mean.*\n.*after the loop"):
        refuse_unsynchronised("gather", in_loop=True, was_left=False)
    with pytest.raises(UsageError, match=r"left its loop by `break`.*\n.*request_stop"):
        refuse_unsynchronised("batches", in_loop=False, was_left=True)
