"""A worker that dies takes its part of everything with it: the run goes on from the checkpoint, which is whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from killed_training import train
from layout_cases import saved_weights
from safetensors.numpy import load_file

import manyhands as mh
from manyhands.testing import RankPool

SCRIPT = Path(__file__).with_name("killed_training.py")


def undisturbed() -> dict[str, Any]:
    return saved_weights(train(mh.Single(), []))


@pytest.mark.slow
@pytest.mark.faults
def test_a_killed_worker_is_named_and_changes_nothing_in_the_result(ranks: RankPool, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "manyhands.cli.main",
        "run",
        "-n",
        "2",
        "--run-dir",
        "run",
        SCRIPT,
        "model.safetensors",
    ]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "rank 1" in ended.stderr and "SIGKILL" in ended.stderr and "restarting from step 4" in ended.stderr
    [alone] = ranks(1, undisturbed)
    for name, value in load_file(tmp_path / "model.safetensors").items():
        assert np.array_equal(value, alone[name]), name
