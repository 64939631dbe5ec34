"""Whole runs with rows on parameter servers and all else on the workers: the bits of mirrored, under kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from manyhands.control.session.run_client import query, request_scale
from manyhands.native import why_not
from tests.docs.test_guide import blocks
from tests.elastic.conftest import Run
from tests.parameter_server.conftest import Start, steps_of
from tests.parameter_server.runs.test_served_runs import TWO_AND_TWO, faults

pytestmark = [
    pytest.mark.slow,
    pytest.mark.faults,
    pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}"),
]

ROWS = {"rows": True, "deep": True, "exact": True}


def test_rows_on_servers_have_the_bits_of_mirrored_under_kills(served: Start, mirrored: Any) -> None:
    places = faults(("server 1", 3, "between two parts of a table"), ("worker 0", 6, "before the rows are sent"))
    run = served({"mode": "hybrid", **ROWS, "epochs": 1, "faults": places}, *TWO_AND_TWO)
    result = run.wait()
    assert result == mirrored(**ROWS, epochs=1)
    assert result["counter"] == [1.0]
    assert len(list(run.folder.glob("fault-*"))) == len(places), "not every fault has happened"


@pytest.mark.long
def test_trainings_that_take_turns_on_servers_are_each_what_they_are_alone(served: Start, mirrored: Any) -> None:
    places = faults(("server 1", 20, "between two parts of a table"), ("worker 0", 24, "before the rows are sent"))
    others = [{"mode": "sync"}, {"mode": "hybrid"}]
    asked = {**ROWS, "epochs": 1, "fits": 2}
    run = served({"mode": "hybrid", **asked, "others": others, "faults": places}, *TWO_AND_TWO)
    result = run.wait()
    assert result.pop("others") == [[2.0], [2.0]]
    assert result == mirrored(**asked)
    assert len(list(run.folder.glob("fault-*"))) == len(places), "not every fault has happened"


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "place", "same"),
    [
        ("hybrid", "before the rows are sent", True),
        ("hybrid", "before the rows are sent", False),
        ("sync", "backward", False),
    ],
)
def test_a_worker_that_joins_one_of_two_trainings_trains_with_its_rows(
    served: Start, mirrored: Any, mode: str, place: str, same: bool
) -> None:
    asked = {**ROWS, "epochs": 1, "fits": 2, "slow_s": {"worker 0": 0.1, "worker 1": 0.1}}
    others = [{"mode": mode, "same": same}]
    run = served({"mode": mode, **asked, "others": others, "faults": faults(("worker 0", 18, place))}, *TWO_AND_TWO)
    result = run.wait()
    assert len(run.generations()) == 3, "no worker joined"
    assert result == mirrored(**ROWS, epochs=1, fits=2, others=[{"mode": None, "same": same}])


@pytest.mark.long
@pytest.mark.parametrize("other", ["sync", "hybrid"])
def test_one_model_goes_from_training_to_training_with_its_rows(served: Start, mirrored: Any, other: str) -> None:
    asked = {**ROWS, "epochs": 1, "fits": 2}
    run = served({"mode": "hybrid", **asked, "others": [{"mode": other, "same": True}]}, "-n", "2", "--servers", "1")
    result, alike = run.wait(), mirrored(**asked, others=[{"mode": None, "same": True}])
    assert result["counter"] == [4.0], "a training has lost what another one did"
    if other == "sync":  # its servers number updates by its own steps, which rows have beside their values
        del result["weights"], alike["weights"]
    assert result == alike


@pytest.mark.long
def test_deaths_at_every_turn_of_a_step_change_nothing(served: Start, mirrored: Any) -> None:
    places = faults(
        ("worker 1", 4, "before the step is taken"),
        ("server 0", 7, "before rows are applied"),
        ("worker 0", 13, "before the rows are sent"),
        ("server 1", 16, "between two parts of a table"),
        ("worker 1", 22, "after the rows are sent"),
        ("server 0", 28, "before the answer of rows"),
        ("worker 0", 34, "backward"),
    )
    asked = {**ROWS, "epochs": 3, "clip": 5.0, "validate": True}
    slow = {"worker 0": 0.05, "worker 1": 0.05}  # so that replacements come in time to die, too
    run = served({"mode": "hybrid", **asked, "slow_s": slow, "save_every": 9, "faults": places}, *TWO_AND_TWO)
    assert run.wait() == mirrored(**asked)
    assert len(list(run.folder.glob("fault-*"))) == len(places), "not every fault has happened"


@pytest.mark.long
def test_a_run_that_was_stopped_resumes_from_its_checkpoint_with_another_number_of_servers(
    served: Start, mirrored: Any
) -> None:
    asked = {"mode": "hybrid", **ROWS}
    first = served({**asked, "waits": {"hold": 8}}, *TWO_AND_TWO, folder="run")
    first.until(lambda: (first.folder / "steps.jsonl").exists() and len(steps_of(first)) > 5, "five steps")
    os.kill(first.process.pid, signal.SIGTERM)
    assert first.process.wait(100) == 75
    assert steps_of(first)[-1]["step"] < 32
    again = served(asked, "-n", "1", "--servers", "3", folder="run")
    assert again.wait() == mirrored(**ROWS)
    assert [one["step"] for one in steps_of(again)] == list(range(1, 33)), "a step was taken again, or left out"


@pytest.mark.long
def test_rows_go_to_fewer_servers_and_to_more_while_the_run_lasts(served: Start, mirrored: Any) -> None:
    slow = {"slow_s": {"worker 0": 0.05, "worker 1": 0.05}, "waits": {"hold": 20, "most_s": 1.0}}
    run = served({"mode": "hybrid", **ROWS, **slow, "epochs": 4}, *TWO_AND_TWO)
    run.until(lambda: (run.folder / "steps.jsonl").exists(), "a step")
    for wanted in (1, 3):
        request_scale(run.directory, None, wanted)
        run.until(lambda wanted=wanted: serving(run) == wanted, f"{wanted} servers with rows")
    (run.folder / "continue").touch()
    assert run.wait() == mirrored(**ROWS, epochs=4)


@pytest.mark.long
def test_a_chief_that_dies_half_way_to_other_servers_is_followed_by_one_that_goes_there(
    served: Start, mirrored: Any
) -> None:
    places = faults(("worker 0", 1, "half-way to other servers"))
    slow = {"worker 0": 0.05, "worker 1": 0.05}
    run = served({"mode": "hybrid", **ROWS, "slow_s": slow, "faults": places}, *TWO_AND_TWO)
    run.until(lambda: (run.folder / "steps.jsonl").exists(), "a step")
    request_scale(run.directory, None, 1)
    assert run.wait(timeout_s=60.0) == mirrored(**ROWS)
    assert len(list(run.folder.glob("fault-*"))) == len(places), "not every fault has happened"


def serving(run: Run) -> int:
    """Servers that are there and have received a step; 0: some have not."""
    servers = query(run.directory).servers
    return len(servers) if all(one.step for one in servers) else 0


@pytest.mark.long
def test_a_model_without_embeddings_is_refused_since_servers_have_nothing_to_do(served: Start, mirrored: Any) -> None:
    run = served({"mode": "hybrid", "exact": True, "epochs": 1}, "-n", "2", "--servers", "1")
    assert run.wait() == mirrored(exact=True, epochs=1)
    assert "the parameter servers have nothing to do" in run.output()


@pytest.mark.long
def test_the_example_of_the_docs_runs_with_rows_on_servers(tmp_path: Path) -> None:
    example = blocks("docs/embeddings.md")[0]
    assert '"mirrored"' in example
    strategy = 'mh.ParameterServer(mode="hybrid", servers=2, workers=2)'
    (tmp_path / "clicks.py").write_text(example.replace('"mirrored"', strategy))
    ended = subprocess.run(
        [sys.executable, "clicks.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / "clicks.safetensors").exists()
