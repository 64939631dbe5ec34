"""A table while, and after, another process changes it: killed at any instruction, it leaves whole updates only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.native import why_not

ROUNDS = 30
ROOT = Path(__file__).parents[2]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.faults,
    pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}"),
]


def test_a_process_that_opens_the_table_of_a_killed_one_finds_whole_updates_only() -> None:
    found = ran("row_rounds", str(ROUNDS), "1")
    assert found["undone"] >= 5, found
    assert found["full"], "rows went, too, where kills could fall into it"


def test_a_lookup_during_an_update_sees_rows_of_one_moment() -> None:
    found = ran("row_peeks")
    assert found["regions"] > 1, "and followed it to another region"


def ran(script: str, *args: str) -> dict[str, int]:
    command = [sys.executable, "-m", f"tests.embedding.{script}", *args]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found
