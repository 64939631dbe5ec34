"""How much time a placer leaves: what Slurm 22.05 prints, and what follows from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.launcher.launch import placer_times
from manyhands.launcher.placers.slurm_times import SlurmTimes, kill_wait, time_left
from manyhands.signals import grace, too_slow_to_commit


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("59:30\n", 3570),
        ("2:03:04", 7384),
        ("1-02:03:04", 93784),
        ("0:00", 0),
        ("UNLIMITED", None),
        ("NOT_SET", None),
        ("", None),
        ("INVALID\n1:00", None),
    ],
)
def test_the_time_left_is_read_as_squeue_prints_it(text: str, seconds: float | None) -> None:
    assert time_left(text) == seconds


def test_the_time_until_slurm_kills_is_read_from_its_configuration() -> None:
    assert kill_wait("JobRequeue              = 1\nKillWait                = 30 sec\nKillOnBadExit = 0\n") == 30
    assert kill_wait("") is None


@pytest.mark.parametrize(
    ("asked_s", "kill_after_s", "left_s", "expected"),
    [
        (30, None, None, 30),  # nothing is known
        (30, None, 10, 30),
        (30, 30, 7200, 25),  # scancel, or a preemption
        (30, 30, None, 25),
        (10, 30, 7200, 10),  # never more than was asked for
        (110, 30, 119, 110),  # --signal=TERM@120: Slurm kills at the limit, and then only after KillWait
        (30, 30, 0, 25),
        (30, 4, 7200, 2),  # less than the time to end in good order
    ],
)
def test_workers_get_what_the_placer_leaves_them(
    asked_s: float, kill_after_s: float | None, left_s: float | None, expected: float
) -> None:
    assert grace(asked_s, kill_after_s=kill_after_s, left_s=left_s) == expected


def test_a_checkpoint_is_too_slow_if_the_placer_kills_before_it_is_committed() -> None:
    assert too_slow_to_commit(41, 30)
    assert too_slow_to_commit(26, 30)
    assert not too_slow_to_commit(24, 30)
    assert not too_slow_to_commit(41, None)


def test_without_slurms_programs_nothing_is_known_and_nothing_is_waited_for(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    times = placer_times({"SLURM_JOB_ID": "7"})
    assert isinstance(times, SlurmTimes)
    assert [times.poll(now) for now in (0.0, 1.0, 20.0)] == [True, False, False]
    assert (times.deadline, times.kill_after_s) == (None, None)
    assert placer_times({}) is placer_times({"SLURM_JOB_ID": "7", "MANYHANDS_PLACER": "none"}) is None
