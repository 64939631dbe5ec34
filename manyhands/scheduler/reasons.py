"""Says in one line why a job has the workers that it has, for `mh queue --why`. Pure. Start reading at `explain`."""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.planner.step_time import StepTime
from manyhands.scheduler.policy import Allocation, JobView, speed

__all__ = ["explain", "failed", "not_ready"]


def explain(view: JobView, decided: Allocation, width: int, total: int, *, resumes: bool) -> str:
    """The reason for a change, or for waiting; empty if the job keeps what it has."""
    given = decided.workers[view.job]
    if given == view.workers:
        return "" if given else _waits(view, decided, total)
    if view.job in decided.tries:
        return f"{view.workers} -> {given} workers: idle workers measure this size"
    if given and not view.workers:
        return f"{'resumes' if resumes else 'starts'} with {_many(given)}{_behind(view, decided)}"
    if not given:
        return f"stops with a checkpoint: {_winners(view, decided, total)}"
    return f"{view.workers} -> {given} workers: {_effect(view, given, width)}{_behind(view, decided)}"


def not_ready(least: int, total: int, after: Sequence[str]) -> str:
    if after:
        return f"waits for job {' and '.join(after)} to finish"
    return f"needs {_many(least)}, and the cluster has {total}: waits for a larger cluster"


def failed(code: int | None, crashes: int) -> str:
    if code is None or crashes:
        return f"failed: its processes were killed {crashes} times in a row without a step between"
    return f"failed with exit code {code}"


def _waits(view: JobView, decided: Allocation, total: int) -> str:
    used = sum(decided.workers.values())
    return f"waits for {_many(view.least)}: {used} of {total} go to jobs that are served before it"


def _behind(view: JobView, decided: Allocation) -> str:
    return "; it is behind its fair share of the cluster" if view.job in decided.behind else ""


def _winners(view: JobView, decided: Allocation, total: int) -> str:
    others = sorted(job for job, number in decided.workers.items() if number and job != view.job)
    named = ", ".join(others[:3]) + (" and others" if len(others) > 3 else "")
    return f"all {_many(total)} go to job{'s'[: len(others) > 1]} {named}"


def _effect(view: JobView, given: int, width: int) -> str:
    if view.step_time is None:
        return "its steps were not measured yet"
    before, after = (speed(view.step_time, number, width) for number in (view.workers, given))
    change = f"{abs(after / before - 1):.0%} {'faster' if after > before else 'slower'}".replace("%", " %")
    if given < view.workers:
        change += "; other jobs gain more by them"
    return change + _sooner(view, view.step_time, before, after)


def _sooner(view: JobView, step_time: StepTime, before: float, after: float) -> str:
    if view.steps_left is None:
        return ""
    seconds = view.steps_left / before - view.steps_left / after
    amount = abs(seconds)
    text = f"{amount:.0f} s" if amount < 90 else f"{amount / 60:.0f} min" if amount < 5400 else f"{amount / 3600:.1f} h"
    return f", {text} {'earlier' if seconds > 0 else 'later'}"


def _many(number: int) -> str:
    return f"{number} worker{'s'[: number != 1]}"
