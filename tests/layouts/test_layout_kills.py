"""A worker that dies takes its part of the model with it: the run goes on from the checkpoint, which is whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from killed_training import LAYOUTS, train
from layout_cases import saved_weights
from safetensors.numpy import load_file
from test_layouts import assert_same_weights

import manyhands as mh
from manyhands.testing import RankPool

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
    command = [sys.executable, "-m", "manyhands.cli.main", "run", "-n", str(workers), "--run-dir", "run", SCRIPT]
    ended = subprocess.run(
        [*command, layout, "model.safetensors"], cwd=tmp_path, capture_output=True, text=True, timeout=150
    )
    assert ended.returncode == 0, ended.stderr
    assert f"rank {workers - 1}" in ended.stderr and "SIGKILL" in ended.stderr
    assert "restarting from step 4" in ended.stderr
    [alone] = ranks(1, undisturbed)
    assert_same_weights(alone, load_file(tmp_path / "model.safetensors"))
