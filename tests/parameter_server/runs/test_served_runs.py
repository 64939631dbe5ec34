"""Whole runs with parameter servers: workers and servers are killed -9, and every gradient counts exactly once."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any

import pytest
from click.testing import CliRunner

from manyhands.cli.runs.status import status
from manyhands.control.session.run_client import query, request_scale
from manyhands.errors import UsageError
from manyhands.events import CheckpointSaved, ServerStarted, StepDone
from manyhands.native import why_not
from manyhands.observe.recorder import read_events
from tests.elastic.conftest import Run
from tests.parameter_server.conftest import Start, steps_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.faults,
    pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}"),
]

TWO_AND_TWO = ("-n", "2", "--servers", "2")


def faults(*places: tuple[str, int, str]) -> list[dict[str, Any]]:
    return [{"who": who, "step": step, "at": at} for who, step, at in places]


def test_synchronous_training_gives_the_bits_of_mirrored_under_kills_and_resumes_with_others_after_a_stop(
    served: Start, mirrored: Any
) -> None:
    places = faults(
        ("server 0", 3, "before commit"),
        ("worker 1", 6, "backward"),
        ("server 1", 9, "after commit"),
        ("worker 0", 24, "half-way through the push"),
        ("server 0", 28, "before the answer"),
    )
    asked = {"exact": True, "clip": 5.0, "validate": True}
    slow = {"slow_s": {"worker 0": 0.03, "worker 1": 0.03}}
    first = served(
        {**asked, **slow, "mode": "sync", "faults": places[:3], "waits": {"hold": 16}}, *TWO_AND_TWO, folder="run"
    )
    first.until(lambda: (first.folder / "steps.jsonl").exists() and len(steps_of(first)) > 12, "twelve steps")
    os.kill(first.process.pid, signal.SIGTERM)
    assert first.process.wait(100) == 75
    taken = [one["step"] for one in steps_of(first)]
    assert taken == list(range(1, len(taken) + 1)), "a step was taken again, or left out"
    assert len(taken) < 24, "it was stopped too late for what comes then"
    again = served({**asked, "mode": "sync", "faults": places}, "-n", "1", "--servers", "1", folder="run")
    assert again.wait() == mirrored(**asked)
    assert {one["staleness"] for one in steps_of(again)} == {0}
    assert len(list(again.folder.glob("fault-*"))) == len(places), "not every fault has happened"


@pytest.mark.long
def test_rows_that_gradients_depend_on_have_the_bits_of_mirrored_under_kills(served: Start, mirrored: Any) -> None:
    places = faults(
        ("worker 1", 4, "half-way through the push"),
        ("server 1", 9, "between tables and weights"),
        ("worker 0", 14, "half-way through the push"),
        ("server 0", 20, "between two parts of a table"),
    )
    asked = {"rows": True, "deep": True, "exact": True}
    run = served({"mode": "sync", **asked, "faults": places}, *TWO_AND_TWO)
    assert run.wait() == mirrored(**asked)
    assert len(list(run.folder.glob("fault-*"))) == len(places), "not every fault has happened"


@pytest.mark.parametrize("mode", ["async", pytest.param("ssp", marks=pytest.mark.long)])
def test_every_gradient_counts_exactly_once(served: Start, mode: str) -> None:
    places = faults(
        ("server 1", 2, "in the register"),
        ("worker 0", 5, "half-way through the push"),
        ("server 0", 9, "before commit"),
        ("server 1", 12, "between tables and weights"),
        ("worker 1", 14, "after the push"),
        ("server 0", 18, "after commit"),
        ("server 1", 24, "before the update"),
    )
    places[-1]["spared"] = True
    run = served({"mode": mode, "rows": True, "epochs": 3, "save_every": 20, "faults": places}, *TWO_AND_TWO)
    result = run.wait()  # where others want the processors, a spare takes its time
    assert result["counter"] == [3.0]
    assert result["reached"] == 48
    assert len(list(run.folder.glob("fault-*"))) == len(places), "not every fault has happened"
    spare = int((run.folder / f"fault-{len(places) - 1}").read_text())
    started = [one for one in read_events(run.directory / "events" / "agent-0.jsonl") if isinstance(one, ServerStarted)]
    assert spare in [one.pid for one in started], "it has not taken over"


@pytest.mark.long
def test_ssp_keeps_its_bound_without_a_slow_worker_that_dies_and_servers_are_there_while_the_run_lasts(
    served: Start,
) -> None:
    asked = {"mode": "ssp", "settings": {"staleness": 2}, "epochs": 4, "slow_s": {"worker 1": 0.15}}
    places = faults(("worker 1", 12, "backward"))
    run = served({**asked, "faults": places, "waits": {"hold": 20}}, *TWO_AND_TWO)
    run.until(lambda: (run.folder / "steps.jsonl").exists(), "a step")
    run.until(lambda: all(one.step for one in query(run.directory).servers), "the versions of both")
    servers = query(run.directory).servers
    assert [one.server for one in servers] == [0, 1]
    check_their_variables(run)
    (run.folder / "continue").touch()
    assert run.wait()["counter"] == [4.0]
    stale = [one["staleness"] for one in steps_of(run)]
    assert 0 < max(stale) <= 2
    gone_with_it(run, [one.pid for one in servers])


@pytest.mark.long
def test_a_save_is_reported_when_it_has_ended_and_not_at_the_next_sync_point(served: Start) -> None:
    asked = {"mode": "sync", "epochs": 1, "save_every": 4, "slow_s": {"worker 0": 0.4, "worker 1": 0.4}}
    run = served(asked, "-n", "2", "--servers", "1")
    run.wait()
    events = list(read_events(run.directory / "events" / "chief.jsonl"))
    saved = {one.step: place for place, one in enumerate(events) if isinstance(one, CheckpointSaved)}
    done = {one.step: place for place, one in enumerate(events) if isinstance(one, StepDone)}
    assert any(saved[step] < done[step + 4] for step in (4, 8, 12)), (saved, done)


@pytest.mark.long
def test_ssp_without_staleness_is_synchronous(served: Start, mirrored: Any) -> None:
    run = served({"mode": "ssp", "settings": {"staleness": 0}, "exact": True}, *TWO_AND_TWO)
    assert run.wait() == mirrored(exact=True)


@pytest.mark.long
def test_a_run_that_was_stopped_resumes_with_more_servers_and_workers(served: Start, mirrored: Any) -> None:
    asked = {"exact": True, "clip": 5.0, "validate": True}
    first = served({**asked, "mode": "sync", "waits": {"hold": 8}}, "-n", "1", "--servers", "1", folder="run")
    first.until(lambda: (first.folder / "steps.jsonl").exists() and len(steps_of(first)) > 5, "five steps")
    os.kill(first.process.pid, signal.SIGTERM)
    assert first.process.wait(100) == 75
    reached = steps_of(first)[-1]["step"]
    assert reached < 32
    again = served({**asked, "mode": "sync"}, *TWO_AND_TWO, folder="run")
    assert again.wait() == mirrored(**asked)
    assert [one["step"] for one in steps_of(again)] == list(range(1, 33)), "a step was taken again, or left out"


def check_their_variables(run: Run) -> None:
    words = [str(run.directory), "--variables"]
    listed = {one["name"]: one for one in json.loads(CliRunner().invoke(status, [*words, "--json"]).output)}
    assert next(iter(listed)) == "counter" and len(listed) == 9
    assert [listed["counter"][fact] for fact in ("shape", "dtype", "num_bytes")] == [[256], "float32", 1024]
    large = listed["layers.4.weight"]["shares"]  # of 1.2 million elements: more than a chunk has
    assert sorted((share["server"], share["chunks"]) for share in large) == [(0, 1), (1, 1)]
    assert sum(share["num_bytes"] for share in large) == listed["layers.4.weight"]["num_bytes"] == 4_800_000
    assert all(0 < share["version"] <= 64 for one in listed.values() for share in one["shares"])
    text = CliRunner().invoke(status, words).output
    assert re.search(r"^layers.4.weight +4000x300 +float32 +4.8 MB +0, 1 +\d+( to \d+)?$", text, re.M), text
    assert text.endswith("on servers 0, 1\n")


def gone_with_it(run: Run, servers: list[int]) -> None:
    with pytest.raises(UsageError, match="is not running here"):
        status.main([str(run.directory), "--variables"], standalone_mode=False)
    for pid in servers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.long
def test_servers_come_and_go_while_workers_train(served: Start, mirrored: Any) -> None:
    slow = {"slow_s": {"worker 0": 0.05, "worker 1": 0.05}, "waits": {"hold": 20, "most_s": 1.0}}
    run = served({"mode": "sync", "exact": True, "epochs": 6, **slow}, *TWO_AND_TWO)

    def scale(servers: int) -> None:
        request_scale(run.directory, None, servers)
        run.until(lambda: len(query(run.directory).servers) == servers, f"{servers} servers")
        before = len(steps_of(run))
        run.until(lambda: len(steps_of(run)) > before + 2, "more steps")

    run.until(lambda: (run.folder / "steps.jsonl").exists(), "a step")
    scale(3)
    scale(1)
    (run.folder / "continue").touch()
    assert run.wait() == mirrored(exact=True, epochs=6)


@pytest.mark.long
def test_validation_by_steps_has_the_rows_of_mirrored_under_kills(served: Start, mirrored: Any) -> None:
    places = faults(
        ("worker 1", 10, "in evaluation"), ("worker 0", 16, "in evaluation"), ("server 0", 21, "after commit")
    )
    asked = {"exact": True, "validate": True, "rows_at": {"validate_every": 5}}
    run = served({**asked, "mode": "sync", "faults": places}, *TWO_AND_TWO)
    result = run.wait()
    assert [row["step"] for row in result["history"]] == [5, 10, 15, 20, 25, 30, 32]
    assert result == mirrored(**asked)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "settings", "rows_at", "steps"),
    [
        ("async", {}, {"validate_every": 5}, [5, 10, 15, 20, 25, 30, 32]),
        ("async", {"push_every": 3, "pull_every": 2}, {"validate_every": 5}, [6, 12, 15, 22, 25, 31, 32]),
        ("local_sgd", {"every": 4, "quorum": 1, "deadline_s": 5.0}, {"validate_every": 5}, [8, 12, 16, 20, 28, 32]),
        ("async", {}, {"validate_every_s": 0.05}, None),
    ],
)
def test_asynchronous_workers_synchronise_to_validate_and_never_cut_a_local_step_range(
    served: Start, mode: str, settings: dict[str, Any], rows_at: dict[str, Any], steps: list[int] | None
) -> None:
    asked = {"mode": mode, "settings": settings, "validate": True, "rows_at": rows_at}
    result = served(asked, "-n", "2", "--servers", "1").wait()
    found = [row["step"] for row in result["history"]]
    assert found == steps if steps is not None else (found == sorted(set(found)) and found[-1] == 32 and len(found) > 2)
    assert all({"loss", "val_loss", "lr"} <= set(row) for row in result["history"])
