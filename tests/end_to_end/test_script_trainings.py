"""Several trainings in one script, killed and resumed: the same bits as undisturbed, on any number of workers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manyhands.checkpoint import newest_valid

SCRIPT = Path(__file__).with_name("three_trainings.py")
MH = [sys.executable, "-m", "manyhands.cli.main", "run", "--threads", "1", "--run-dir", "run"]

pytestmark = [pytest.mark.slow, pytest.mark.faults]


def run(folder: Path, *words: str, **asked: Any) -> tuple[int, Any]:
    """The exit code, and what the script has written."""
    folder.mkdir(exist_ok=True)
    out = folder / "out.json"
    asked = {"out": str(out), "flag": str(folder / "flag"), **asked}
    done = subprocess.run([*MH, *words, str(SCRIPT), json.dumps(asked)], cwd=folder, capture_output=True, timeout=200)
    return done.returncode, json.loads(out.read_text()) if out.exists() else done.stderr.decode()


@pytest.fixture
def alone(tmp_path: Path, once: Callable[[str, Callable[[], str]], str]) -> Any:
    return json.loads(once("three trainings", lambda: json.dumps(run(tmp_path / "alone", "-n", "1")[1])))


@pytest.mark.long
def test_all_is_killed_in_the_second_training_and_resumes_on_other_workers(tmp_path: Path, alone: Any) -> None:
    code, _ = run(tmp_path / "killed", "-n", "2", kill=[2, 6])
    assert code == -9
    code, result = run(tmp_path / "killed", "-n", "3")
    assert (code, result) == (0, alone)
    homes = [tmp_path / "killed" / "run" / name for name in (".", "trainings/2", "trainings/3")]
    found = [newest_valid(home / "checkpoints") for home in homes]
    assert [one.step for one in found if one is not None] == [8, 12, 4]


def test_a_worker_that_joins_in_the_second_training_trains_in_all_others(tmp_path: Path, alone: Any) -> None:
    code, result = run(tmp_path / "elastic", "-n", "2", "--elastic", "2:2", kill=[2, 5], slot=1)
    assert (code, result) == (0, alone)


@pytest.mark.long
@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_killed_in_any_training_on_any_number_of_workers(
    tmp_path: Path, alone: Any, workers: int, elastic: bool
) -> None:
    flags = ["-n", str(workers), *(["--elastic", "1:3"] if elastic else [])]
    code, _ = run(tmp_path / "killed", *flags, kill=[3 if workers == 2 else 2, 3])
    assert code == -9
    assert run(tmp_path / "killed", *flags) == (0, alone)


@pytest.mark.long
@pytest.mark.parametrize("training", [2, 3])
def test_a_parameter_server_that_is_killed_in_a_later_training_changes_nothing(
    tmp_path: Path, alone: Any, training: int
) -> None:
    asked = {"servers": True, "kill": [training, 3], "whom": "server", "slot": 0}
    assert run(tmp_path / "killed", "-n", "2", "--servers", "1", **asked) == (0, alone)
    assert (tmp_path / "killed" / "flag").exists(), "no server was killed"


@pytest.mark.long
def test_trainings_on_parameter_servers_resume_after_all_is_killed_in_the_second(tmp_path: Path, alone: Any) -> None:
    flags = ["-n", "2", "--servers", "1"]
    code, _ = run(tmp_path / "killed", *flags, servers=True, kill=[2, 6])
    assert code == -9
    assert run(tmp_path / "killed", *flags, servers=True) == (0, alone)


@pytest.mark.long
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_worker_of_an_elastic_mesh_is_killed_in_the_second_training(tmp_path: Path, axis: str) -> None:
    mesh, flags = {"data": 2, axis: 2}, ["-n", "4", "--elastic", "4:4"]
    code, undisturbed = run(tmp_path / "undisturbed", *flags, mesh=mesh)
    assert code == 0
    assert run(tmp_path / "killed", *flags, mesh=mesh, kill=[2, 5], slot=1) == (0, undisturbed)
    assert (tmp_path / "killed" / "flag").exists(), "no worker was killed"
