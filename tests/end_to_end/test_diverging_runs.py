"""Runs of the command line whose numbers go wrong: named, stopped or replaced, and what comes after ends the same."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from manyhands.events import CopiesDiverged, Resumed, WrongGradientFound
from manyhands.native import why_not
from manyhands.observe.recorder import read_events
from manyhands.parallel.replicas.divergence import appoint
from tests.end_to_end.test_runs import MH

pytestmark = [pytest.mark.slow, pytest.mark.faults]
SCRIPT = Path(__file__).with_name("broken_training.py")


def run(folder: Path, *words: str, fault: str = "none", after: int = 7) -> tuple[int, str, str]:
    command = [*MH, "run", "--run-dir", "run", *words, str(SCRIPT), fault, str(after)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    found = re.search(r"weights (\w+)", done.stdout)
    return done.returncode, found.group(1) if found else "", done.stderr


def events(folder: Path, kind: type) -> list:
    files = sorted((folder / "run" / "events").glob("*.jsonl"))
    return [event for file in files for event in read_events(file) if isinstance(event, kind)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, once: Any) -> str:
    def train() -> str:
        code, weights, err = run(tmp_path_factory.mktemp("undisturbed"), "-n", "1")
        assert code == 0, err
        return weights

    return str(once("broken-training", train))


def test_two_copies_that_differ_end_the_run_and_the_same_command_resumes_where_they_agreed(
    tmp_path: Path, undisturbed: str
) -> None:
    words = ("-n", "2", "--plane", "gloo", "--check-every", "4")
    code, _, err = run(tmp_path, *words, fault="weight")
    assert code == 1, err
    assert "Diverged" in err and "not the same, and it cannot be decided which are right" in err
    assert "restarting" not in err, "it would not help"
    assert events(tmp_path, CopiesDiverged)[0].step == 8
    code, weights, err = run(tmp_path, *words)
    assert code == 0, err
    assert events(tmp_path, Resumed)[-1].step == 4
    assert weights == undisturbed


@pytest.mark.long
@pytest.mark.parametrize("elastic", [(), ("--elastic", "1:3")], ids=["static", "elastic"])
def test_of_three_copies_the_odd_one_is_healed_and_the_run_ends_as_if_nothing_had_been(
    tmp_path: Path, undisturbed: str, elastic: tuple[str, ...]
) -> None:
    code, weights, err = run(tmp_path, "-n", "3", "--plane", "gloo", "--check-every", "1", *elastic, fault="weight")
    assert code == 0, err
    (found,) = events(tmp_path, CopiesDiverged)
    assert (found.step, found.ranks, found.healed) == (7, [1], True)
    assert re.search(r"the weights or optimizer states of rank 1 on \S+ \(pid \d+\) differed from those", err)
    assert not events(tmp_path, Resumed)
    assert weights == undisturbed


@pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")
@pytest.mark.parametrize(
    "elastic", [pytest.param((), marks=pytest.mark.long), ("--elastic", "1:2")], ids=["static", "elastic"]
)
def test_shared_weights_that_something_changed_restart_the_run_from_before(
    tmp_path: Path, undisturbed: str, elastic: tuple[str, ...]
) -> None:
    code, weights, err = run(tmp_path, "-n", "2", *elastic, fault="weight")
    assert code == 0, err
    assert "0.weight, or its optimizer state, changed" in err
    assert events(tmp_path, Resumed)[-1].step < 7
    assert weights == undisturbed


@pytest.mark.parametrize(
    ("role", "plane"),
    [
        pytest.param("owner", "auto", marks=pytest.mark.long),
        ("auditor", "gloo"),
        pytest.param("owner", "gloo", marks=pytest.mark.long),
        pytest.param("auditor", "auto", marks=pytest.mark.long),
    ],
)
def test_an_elastic_run_replaces_a_worker_whose_gradients_are_wrong_and_loses_nothing(
    tmp_path: Path, undisturbed: str, plane: str, role: str
) -> None:
    """From a step on, in which the worker's gradients are looked at: what it did before was right."""
    shares = [range(2), range(2, 4), range(4, 6)]
    step = next(step for step in range(5, 30) if getattr(appoint(0, step, shares), role) == 1)
    words = ("-n", "3", "--elastic", "1:3", "--audit", "--plane", plane)
    code, weights, err = run(tmp_path, *words, fault="gradient", after=step - 1)
    assert code == 0, err
    (found,) = events(tmp_path, WrongGradientFound)
    assert (found.step, found.ranks, found.replaced) == (step, [1], True)
    assert not events(tmp_path, Resumed), "no worker went back to a checkpoint"
    assert re.search(r"finds that rank \d on \S+ \(pid \d+\) is wrong", err)
    assert weights == undisturbed
