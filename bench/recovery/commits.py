"""The commit logs of `recovery_script`: which worker committed which step when. Pure, except for reading files."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

__all__ = ["Commit", "commits_between", "first_in_later", "read_commits", "stall", "step_times"]


class Commit(NamedTuple):
    at_s: float
    step: int
    generation: tuple[int, ...]


def read_commits(folder: Path) -> list[Commit]:
    """All commits of all workers, by time. A line that is still being written is left for the next call."""
    found = []
    for file in folder.glob("commits-*"):
        for line in file.read_text().split("\n")[:-1]:
            at_ns, step, generation = line.split()
            found.append(Commit(int(at_ns) / 1e9, int(step), tuple(map(int, generation.split(".")))))
    return sorted(found)


def first_in_later(commits: Sequence[Commit], generation: tuple[int, ...]) -> Commit | None:
    """The first commit of any generation after this one."""
    return next((commit for commit in commits if commit.generation > generation), None)


def step_times(commits: Sequence[Commit]) -> list[float]:
    """When each step was first committed by any worker, in order of steps."""
    first: dict[int, float] = {}
    for commit in commits:
        first.setdefault(commit.step, commit.at_s)
    return [first[step] for step in sorted(first)]


def stall(commits: Sequence[Commit], at_s: float, around_s: float = 1.0) -> float:
    """The longest gap between steps around a moment, beyond the usual one."""
    times = [time for time in step_times(commits) if abs(time - at_s) <= around_s]
    gaps = [after - before for before, after in pairwise(times)]
    return max(gaps) - median(gaps)


def commits_between(commits: Sequence[Commit], start_s: float, end_s: float) -> int:
    return sum(start_s <= time < end_s for time in step_times(commits))
