"""Reads a trace for `mh cluster simulate`: jobs, when they arrive, how many steps they have, how long a step takes.

One JSON object per line. `step_s` gives seconds of a step by the number of workers; between the given numbers, time is
interpolated over 1 / workers. Start reading at `read_trace`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from manyhands.errors import UsageError
from manyhands.scheduler.simulate import TracedJob

__all__ = ["TraceLine", "read_trace"]

EXAMPLE = '{"name": "a", "arrives_s": 0, "steps": 1000, "step_s": {"1": 0.5, "4": 0.2}}'


class TraceLine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    arrives_s: float
    steps: int
    step_s: dict[int, float]
    least: int | None = None
    most: int | None = None
    """Default: the smallest and the largest number of workers in `step_s`."""
    priority: float = 1.0
    after: list[str] = []

    def __post_init__(self) -> None:
        if not self.step_s or min(self.step_s) < 1 or min(self.step_s.values()) <= 0:
            raise ValueError("step_s has to give the seconds of a step for one number of workers or more")
        if self.steps < 1 or self.arrives_s < 0 or self.priority <= 0:
            raise ValueError("steps and priority have to be above 0, arrives_s not below")
        if not min(self.step_s) <= self.smallest <= self.largest <= max(self.step_s):
            raise ValueError(f"least {self.smallest} and most {self.largest} have to be within the sizes of step_s")

    @property
    def smallest(self) -> int:
        return min(self.step_s) if self.least is None else self.least

    @property
    def largest(self) -> int:
        return max(self.step_s) if self.most is None else self.most


def read_trace(path: Path) -> list[TracedJob]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"Cannot read the trace {path}: {error.strerror}.") from error
    found = [_decode(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UsageError(f"The trace {path} has no job.", fix=[EXAMPLE])
    jobs = {one.name: one for one in found}
    if len(jobs) < len(found):
        raise UsageError(f"The trace {path} has two jobs of the same name.")
    _check_after(path, jobs)
    return [_traced(one) for one in found]


def _decode(path: Path, number: int, line: bytes) -> TraceLine:
    try:
        return msgspec.json.decode(line, type=TraceLine, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"Not a job of a trace: {error}.", where=f"{path} line {number}", fix=[EXAMPLE]) from error


def _check_after(path: Path, jobs: Mapping[str, TraceLine]) -> None:
    """Each job may only wait for jobs of the trace, and never, through others, for itself."""
    done: set[str] = set()
    for _ in jobs:
        done |= {name for name, one in jobs.items() if set(one.after) <= done}
    for name, one in jobs.items():
        if unknown := set(one.after) - set(jobs):
            raise UsageError(f"{name} is after {min(unknown)}, which is not in the trace.", where=str(path))
    if cycle := [name for name in jobs if name not in done]:
        raise UsageError(f"Jobs wait for each other in a circle: {', '.join(cycle)}.", where=str(path))


def _traced(one: TraceLine) -> TracedJob:
    return TracedJob(
        name=one.name,
        arrives_s=one.arrives_s,
        steps=one.steps,
        step_s=functools.partial(_step_s, sorted(one.step_s.items())),
        least=one.smallest,
        most=one.largest,
        priority=one.priority,
        after=tuple(one.after),
    )


def _step_s(table: Sequence[tuple[int, float]], placed: Sequence[int]) -> float:
    workers = sum(placed)
    below = max((one for one in table if one[0] <= workers), default=table[0])
    above = min((one for one in table if one[0] >= workers), default=table[-1])
    if below[0] == above[0]:
        return below[1]
    part = (1 / below[0] - 1 / workers) / (1 / below[0] - 1 / above[0])
    return below[1] + part * (above[1] - below[1])
