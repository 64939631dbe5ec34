"""A disk that is full, a checkpoint that is damaged, and then all workers die: the run ends where it would have."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhands.checkpoint.reader import newest_valid

from .conftest import ENDLESS, Start

pytestmark = [pytest.mark.faults, pytest.mark.long]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Where the first run of the test keeps its checkpoints."""
    place = tmp_path / "run-0" / "run" / "checkpoints"
    place.mkdir(parents=True, mode=0o700)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("NOT SHOWN HERE: a full disk needs root, to mount a small tmpfs")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> Path:
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return filler
    raise AssertionError("this disk is never full")


def flip_a_bit(checkpoint: Path) -> None:
    (shard,) = checkpoint.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


def test_a_run_outlives_a_full_disk_a_damaged_checkpoint_and_all_of_its_workers(
    small_disk: Path, elastic: Start, undisturbed: Any
) -> None:
    run = elastic({**ENDLESS, "slow_s": 0.02, "save_every": 10}, "-n", "3", "--elastic", "1:3")
    run.until(lambda: run.step() > 25, "step 25")
    filler = fill(small_disk)
    run.until(lambda: "was not saved" in run.output(), "word of a checkpoint that could not be saved")
    there = run.step()
    run.until(lambda: run.step() > there + 10, "steps with a full disk")
    filler.unlink()
    damaged = run.until(
        lambda: (found := newest_valid(small_disk)) and found.step > there and found, "a checkpoint again"
    )
    members = run.members()
    flip_a_bit(damaged.path)
    for member in members:
        os.kill(member.pid, signal.SIGKILL)
    assert len(members) == 3
    result = run.enough()
    assert result == undisturbed({"steps": result["reached"]})
    assert "attempt" in run.output() or "restart" in run.output(), "no worker was left: the run began again"
