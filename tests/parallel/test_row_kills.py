"""A process killed at any instruction of an update leaves a table as it was before it, or as it is after it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.native import why_not

ROUNDS = 30


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")
def test_whoever_opens_the_table_of_a_killed_process_finds_whole_updates_only() -> None:
    script = Path(__file__).with_name("row_rounds.py")
    done = subprocess.run([sys.executable, str(script), str(ROUNDS), "1"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["undone"] >= 5, found
    assert found["full"], "rows went, too, where kills could fall into it"
