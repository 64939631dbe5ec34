"""Two copies of the weights: a worker killed at any instruction of an update tears nothing; others finish its part."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.native import why_not

ROUNDS = 16


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")
def test_a_worker_killed_in_an_update_leaves_the_old_weights_whole_and_its_part_to_others() -> None:
    script = Path(__file__).with_name("flip_rounds.py")
    done = subprocess.run([sys.executable, str(script), str(ROUNDS), "1"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    where = json.loads(done.stdout)
    assert sum(where.values()) == ROUNDS
    assert where.get("in an update", 0) >= 2, where
