"""A worker that dies takes its part of the model with it: the run restarts from the checkpoint, which is whole.

Or, in an elastic mesh, from a living replica, which has the same part.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import manyhands as mh
from manyhands.events import StepDone
from manyhands.observe.recorder import read_events
from manyhands.testing import RankPool
from tests.layouts.killed_training import KILLED_AT, LAYOUTS, STEPS, train
from tests.layouts.layout_cases import saved_weights
from tests.layouts.test_layouts import assert_same_weights

MH = [sys.executable, "-m", "manyhands.cli.main"]
TWO_HOSTS = ["--hosts-wanted", "2", "--listen", "127.0.0.1", "--insecure-data-plane", "--join-file", "join"]
SCRIPT = Path(__file__).with_name("killed_training.py")


def undisturbed() -> dict[str, Any]:
    return saved_weights(train(mh.Single(), []))


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.long] * (name != "pipeline")) for name in LAYOUTS]
)
def test_a_killed_worker_is_named_and_changes_nothing_in_the_result(
    ranks: RankPool, tmp_path: Path, layout: str
) -> None:
    workers = LAYOUTS[layout].workers
    command = [*MH, "run", "-n", str(workers), "--run-dir", "run", SCRIPT]
    ended = subprocess.run(
        [*command, layout, "model.safetensors"], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    assert f"rank {workers - 1}" in ended.stderr and "SIGKILL" in ended.stderr
    assert "restarting from step 4" in ended.stderr
    [alone] = ranks(1, undisturbed)
    assert_same_weights(alone, load_file(tmp_path / "model.safetensors"))


def elastic(folder: Path, bounds: str, *words: str, second_host: bool = False) -> str:
    """The stderr of a run that ended well. With a second host, which joins at once, each has two workers."""
    options = ["-n", "2", *TWO_HOSTS] if second_host else ["-n", "4"]
    command = [*MH, "run", *options, "--elastic", bounds, "--run-dir", "run", str(SCRIPT), *words]
    run = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    joined: subprocess.Popen[bytes] | None = None
    try:
        if second_host:
            until((folder / "join").exists)
            joined = subprocess.Popen(
                [*MH, "agent", "--join", "join", "-n", "2"], cwd=folder, stderr=subprocess.DEVNULL
            )
        _, output = run.communicate(timeout=200)
    finally:
        for process in [run] if joined is None else [run, joined]:
            process.kill()
            process.wait()
    assert run.returncode == 0, output
    return output


def until(condition: Callable[[], bool], timeout_s: float = 100.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.02)


def assert_no_step_is_lost(folder: Path) -> None:
    """None is taken twice, and the remaining workers repeat the one in which the others died.

    Of what a chief took before it was killed, it may not have written all down.
    """
    events = [event for path in (folder / "run" / "events").glob("chief*") for event in read_events(path)]
    steps = [event.step for event in events if isinstance(event, StepDone)]
    assert len(steps) == len(set(steps)) and steps[-4:] == list(range(KILLED_AT, STEPS + 1)), steps


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize(
    ("layout", "killed"),
    [
        ("mesh", ["2 in evaluation", "3"]),
        pytest.param("mesh", ["0"], marks=pytest.mark.long),
        pytest.param("mesh", ["0 in evaluation"], marks=pytest.mark.long),
        pytest.param("data and tensor", ["1"], marks=pytest.mark.long),
    ],
)
def test_in_an_elastic_mesh_a_newcomer_gets_its_part_from_a_living_replica(
    ranks: RankPool, tmp_path: Path, layout: str, killed: list[str]
) -> None:
    output = elastic(tmp_path, "4:4", layout, "model.safetensors", *killed)
    assert f"lost rank {killed[0][0]}" in output and "restarting" not in output
    assert output.count("SIGKILL") == output.count("1 joined") == len(killed)
    assert_no_step_is_lost(tmp_path)
    [alone] = ranks(1, undisturbed)
    assert_same_weights(alone, load_file(tmp_path / "model.safetensors"))


@pytest.mark.long
@pytest.mark.faults
def test_a_mesh_that_is_scaled_down_continues_with_a_whole_replica(ranks: RankPool, tmp_path: Path) -> None:
    """The replacement of the first worker has the highest rank, and is in the replica of one that stays."""
    output = elastic(tmp_path, "2:4", "mesh", "model.safetensors", "0", "scaled to 2")
    assert "2 left" in output and "restarting" not in output
    [alone] = ranks(1, undisturbed)
    assert_same_weights(alone, load_file(tmp_path / "model.safetensors"))


@pytest.mark.long
@pytest.mark.faults
def test_a_part_that_no_living_replica_has_comes_from_the_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    output = elastic(tmp_path, "4:4", "mesh", "model.safetensors", "1", "3")
    assert "No living worker has stage 2 of 2" in output and "restarting from step 4" in output
    [alone] = ranks(1, undisturbed)
    assert_same_weights(alone, load_file(tmp_path / "model.safetensors"))


@pytest.mark.long
@pytest.mark.faults
@pytest.mark.parametrize("layout", ["mesh", "tensor"])
def test_the_remaining_hosts_continue(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    """A host that had a whole replica is done without; one that had parts of the only one, from the checkpoint."""
    output = elastic(tmp_path, "2:4", layout, "model.safetensors", "host of 2", second_host=True)
    assert "its host went silent" in output
    assert ("restarting from step 4" in output) == (layout == "tensor")
    if layout == "mesh":
        assert_no_step_is_lost(tmp_path)
    [alone] = ranks(1, undisturbed)
    assert_same_weights(alone, load_file(tmp_path / "model.safetensors"))
