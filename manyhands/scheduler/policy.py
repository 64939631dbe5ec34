"""Decides how many workers each job gets. Pure: jobs and a cluster in, numbers of workers and reasons out.

Every job gets its least first, in the order of urgency; then the next workers go to the job whose weighted speedup per
worker grows most, never below half the efficiency of its smallest size. Weights: `jct` 1 / remaining work, so that the
mean completion time is short; `fair` equal; `priority` as submitted. A job that falls behind its fair share of the
cluster is served before the others, so no job starves. A size changes only if that pays for the pause that it costs.
Start reading at `allocate`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from typing import Literal

import msgspec

from manyhands.planner.step_time import StepTime

__all__ = ["Allocation", "JobView", "Policy", "allocate", "fair_completion_s", "speed"]

Policy = Literal["jct", "fair", "priority"]

LEAST_EFFICIENCY = 0.5
# A size that was never measured is at most twice the largest one that was.
LARGEST_GROWTH = 2
# How long a new size usually lasts: the pause that a change costs has to be regained within this time.
HORIZON_S = 60.0
# Workers that a job has count so much more than workers that it could get, or jobs would exchange them all the time.
HOLDING = 1.1
# The same for jobs that run and jobs that wait, as a start costs more than another worker does.
RUNNING = 2.0
# A job is served first from when it could no longer end within this multiple of its fair completion time, even with
# CATCH_UP times its fair share.
BEHIND, CATCH_UP = 1.15, 1.5
# A waiting job whose steps were never measured is behind after this long.
PATIENCE_S = 600.0
UNKNOWN_WORK_S = 60.0
TINY_SHARE = 1e-3


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy knows of a job that has not ended."""

    job: str
    order: int
    """Of submission."""
    least: int
    most: int
    workers: int = 0
    """That it has now; 0: it waits."""
    pinned: bool = False
    """It is being started or changed, and keeps its size."""
    recent: bool = False
    """Its size was changed less than a minute ago, and stays unless the job is behind."""
    step_time: StepTime | None = None
    tried: tuple[int, ...] = ()
    """Sizes that were measured."""
    steps: float | None = None
    """In all. None: its data has no known length, or it has not begun."""
    steps_left: float | None = None
    age_s: float = 0.0
    mean_share: float = 1.0
    """The mean, since its submission, of the workers that each unfinished job would have had in equal parts."""
    start_s: float = 30.0
    rescale_s: float = 2.0
    """Pause of training by a start, and by a change of size."""
    priority: float = 1.0


class Allocation(msgspec.Struct, frozen=True):
    workers: dict[str, int]
    tries: tuple[str, ...] = ()
    """Jobs whose new size is only tried, with workers that no job would use."""
    behind: tuple[str, ...] = ()
    """Jobs that were served first, because they are behind their fair share."""


def allocate(jobs: Sequence[JobView], hosts: Sequence[int], policy: Policy) -> Allocation:
    """Workers of each job, 0 to let it wait, on hosts with so many workers each, in whatever order the jobs are."""
    jobs = sorted(jobs, key=lambda one: one.order)
    width, total = max(hosts, default=0), sum(hosts)
    share = total / max(1, len(jobs))
    behind = tuple(one.job for one in jobs if _is_behind(one, width, share))
    jobs = [msgspec.structs.replace(one, pinned=one.pinned or (one.recent and one.job not in behind)) for one in jobs]
    growths = {one.job: _Growth(one, width) for one in jobs}
    given = _grow(jobs, growths, _serve_least(jobs, total, policy, behind), total, policy, behind)
    kept = {one.job for one in jobs if given[one.job] > one.workers > 0 and not _pays(one, given[one.job], width)}
    if kept:
        pinned = [msgspec.structs.replace(one, pinned=True) if one.job in kept else one for one in jobs]
        given = _grow(pinned, growths, _serve_least(pinned, total, policy, behind), total, policy, behind)
    given = _undo_needless_shrinking(jobs, given, total)
    given, tries = _try_sizes(jobs, given, total)
    return Allocation(given, tries, behind)


# ---- what a job is worth ---------------------------------------------------------------------------------------


@functools.lru_cache(100_000)
def speed(step_time: StepTime, workers: int, width: int) -> float:
    """Steps per second on as few hosts of `width` workers as possible."""
    return 1.0 / step_time.at(math.ceil(workers / width), workers)


def fair_completion_s(job: JobView, width: int, share: float) -> float | None:
    """From submission to end, if the job always had an equal share, which is `share` workers now; None: unknown."""
    if job.step_time is None or job.steps is None:
        return None
    before, after = (
        job.steps / best_speed(job.step_time, min(max(each, TINY_SHARE), job.most), width)
        for each in (job.mean_share, share)
    )
    part = max(0.0, job.age_s - job.start_s) / before
    return job.start_s + before if part >= 1.0 else max(job.age_s, job.start_s) + (1.0 - part) * after


def best_speed(step_time: StepTime, workers: float, width: int) -> float:
    """Steps per second with at most so many workers; between whole numbers of workers, a straight line."""
    below, part = math.floor(workers), workers % 1
    best = _best_speed(step_time, below, width)
    return best + part * (_best_speed(step_time, below + 1, width) - best) if part else best


@functools.lru_cache(100_000)
def _best_speed(step_time: StepTime, workers: int, width: int) -> float:
    if workers < 1:
        return 0.0
    return max(speed(step_time, workers, width), _best_speed(step_time, workers - 1, width))


def _is_behind(job: JobView, width: int, share: float) -> bool:
    """Whether it ends too late even if from now on it has somewhat more than an equal share."""
    fair_s = fair_completion_s(job, width, share)
    if fair_s is None or job.step_time is None or job.steps_left is None:
        return job.workers == 0 and job.age_s > PATIENCE_S
    most = min(max(CATCH_UP * share, job.least), _hull(job.step_time, job.least, job.most, width)[-1])
    left_s = job.steps_left / best_speed(job.step_time, most, width) + (job.start_s if job.workers == 0 else 0.0)
    return job.age_s + left_s > BEHIND * fair_s


def _work_s(job: JobView) -> float:
    """Worker seconds that are left, at its least size; a job that was never measured is assumed to be short."""
    if job.step_time is None or job.steps_left is None:
        return UNKNOWN_WORK_S
    return max(1.0, job.steps_left * job.step_time.at(1, job.least) * job.least)


def _weight(job: JobView, policy: Policy) -> float:
    match policy:
        case "jct":
            return job.priority / math.sqrt(_work_s(job))
        case "fair":
            return 1.0
        case "priority":
            return job.priority


# ---- the least of every job ------------------------------------------------------------------------------------


def _serve_least(jobs: Sequence[JobView], total: int, policy: Policy, behind: Sequence[str]) -> dict[str, int]:
    """Its least to each job, most urgent first, as long as it fits.

    A pinned job keeps what it has, unless another one needs it for its least: that one comes first.
    """
    pinned = {one.job for one in jobs if one.pinned and one.workers}
    while True:
        given = _serve_in_order(jobs, pinned, total, policy, behind)
        larger = [one for one in jobs if one.job in pinned and one.workers > one.least]
        if all(given.values()) or not larger:
            return given
        pinned.discard(max(larger, key=lambda one: (one.workers - one.least, -one.order)).job)


def _serve_in_order(
    jobs: Sequence[JobView], pinned: Collection[str], total: int, policy: Policy, behind: Sequence[str]
) -> dict[str, int]:
    given, free = {one.job: 0 for one in jobs}, total

    def urgency(one: JobView) -> tuple[bool, bool, float, int]:
        weight = _weight(one, policy) * (RUNNING if one.workers else 1.0)
        return one.job not in pinned, one.job not in behind, -weight, one.order

    for one in sorted(jobs, key=urgency):
        wanted = one.workers if one.job in pinned else one.least
        if wanted <= free:
            given[one.job], free = wanted, free - wanted
    return given


# ---- more than the least ---------------------------------------------------------------------------------------


class _Growth:
    """The sizes of a job that are worth having: on the upper hull of its speed, and not below half the efficiency."""

    def __init__(self, job: JobView, width: int) -> None:
        largest = min(job.most, LARGEST_GROWTH * max(job.tried, default=0))
        self._hull = _hull(job.step_time, job.least, largest, width) if job.step_time is not None else ()
        self._job, self._width = job, width

    def next(self, workers: int, free: int) -> tuple[int, float] | None:
        """The next size that at most `free` workers more allow, and the speedup that each of them adds."""
        larger = next((size for size in self._hull if size > workers), None)
        if larger is None or free < 1:
            return None
        size = min(larger, workers + free)
        assert self._job.step_time is not None
        base = speed(self._job.step_time, self._job.least, self._width)
        more = speed(self._job.step_time, size, self._width) - speed(self._job.step_time, workers, self._width)
        return (size, more / base / (size - workers)) if more > 0 else None


@functools.lru_cache(20_000)
def _hull(step_time: StepTime, least: int, largest: int, width: int) -> tuple[int, ...]:
    base = speed(step_time, least, width) / least
    sizes = [
        size for size in range(least, largest + 1) if speed(step_time, size, width) >= LEAST_EFFICIENCY * base * size
    ]
    hull: list[int] = []
    for size in sizes:
        while len(hull) > 1 and _rises(step_time, hull[-2], hull[-1], size, width):
            hull.pop()
        if not hull or speed(step_time, size, width) > speed(step_time, hull[-1], width):
            hull.append(size)
    return tuple(hull)


def _rises(step_time: StepTime, first: int, middle: int, last: int, width: int) -> bool:
    """Whether the way from `first` to `last` is at least as steep as that to `middle`."""
    start = speed(step_time, first, width)
    to_middle = (speed(step_time, middle, width) - start) / (middle - first)
    return (speed(step_time, last, width) - start) / (last - first) >= to_middle


def _grow(
    jobs: Sequence[JobView],
    growths: dict[str, _Growth],
    given: dict[str, int],
    total: int,
    policy: Policy,
    behind: Sequence[str],
) -> dict[str, int]:
    """The workers that are left, each to the job that gains most by it."""
    given, free = dict(given), total - sum(given.values())
    growing = [one for one in jobs if given[one.job] and not (one.pinned and given[one.job] == one.workers)]
    weights, share = {one.job: _weight(one, policy) for one in growing}, total / max(1, len(jobs))
    while free > 0:
        best: tuple[tuple[int, float, int], JobView, int] | None = None
        for one in growing:
            found = growths[one.job].next(given[one.job], free)
            if found is None:
                continue
            size, rate = found
            rate *= weights[one.job] * (HOLDING if size <= one.workers else 1.0)
            rank = (_catches_up(one, given[one.job], share, behind), rate, -one.order)
            if best is None or rank > best[0]:
                best = rank, one, size
        if best is None:
            return given
        _, one, size = best
        free -= size - given[one.job]
        given[one.job] = size
    return given


def _catches_up(job: JobView, workers: int, share: float, behind: Sequence[str]) -> int:
    """A job that is behind is served earlier up to an equal share, less so somewhat above it, and then not at all."""
    return (workers < share) + (workers < CATCH_UP * share) if job.job in behind else 0


# ---- changing only what pays -----------------------------------------------------------------------------------


def _pays(job: JobView, workers: int, width: int) -> bool:
    """Whether a larger size regains its pause in the time until the next change, or until the job ends."""
    if job.step_time is None:
        return False
    before, after = (speed(job.step_time, number, width) for number in (job.workers, workers))
    horizon = HORIZON_S if job.steps_left is None else min(HORIZON_S, job.steps_left / before)
    return (after / before - 1.0) * horizon > job.rescale_s


def _undo_needless_shrinking(jobs: Sequence[JobView], given: dict[str, int], total: int) -> dict[str, int]:
    """A job becomes smaller, or stops, only if another one gets its workers."""
    given, free = dict(given), total - sum(given.values())
    for one in jobs:
        back = one.workers - given[one.job]
        if given[one.job] and 0 < back <= free:
            given[one.job], free = one.workers, free - back
    return given


def _try_sizes(jobs: Sequence[JobView], given: dict[str, int], total: int) -> tuple[dict[str, int], tuple[str, ...]]:
    """Idle workers measure a size: one more than a job has, or twice as many, if it was never tried."""
    given, free, tries = dict(given), total - sum(given.values()), []
    for one in jobs:
        has = given[one.job]
        if one.pinned or one.step_time is None or not has or has != one.workers or not _has_time(one):
            continue
        for size in (has + 1, 2 * has):
            if size <= one.most and size - has <= free and size not in one.tried:
                given[one.job], free = size, free - (size - has)
                tries.append(one.job)
                break
    return given, tuple(tries)


def _has_time(job: JobView) -> bool:
    """Whether what is left is long compared with the pauses of a try."""
    assert job.step_time is not None
    return job.steps_left is None or job.steps_left * job.step_time.at(1, max(1, job.workers)) > 20 * job.rescale_s
