"""Which workers are slow, in which phase and by how much, and how to divide the slices then: arithmetic over times.

Workers exchange the times of each step (`step_exchange`), so all have the same numbers and reach the same decision
without another message. No clock, no torch: times in, decisions out. Start reading at `paces_of`.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from statistics import median
from typing import NamedTuple

from manyhands.parallel.replicas.phase_timer import PHASES

__all__ = ["Pace", "Slow", "best_parts", "better_parts", "paces_of", "slow_workers"]

# The time of these phases grows with the worker's number of slices, that of the others with the size of the model.
NUM_SLICED = PHASES.index("backward") + 1


class Pace(NamedTuple):
    """How long one worker usually takes for its share of a step."""

    slices: int
    busy_s: tuple[float, ...]
    """Seconds of work in each of `PHASES`."""
    waiting_s: float

    @property
    def per_slice_s(self) -> float:
        return sum(self.busy_s[:NUM_SLICED]) / max(1, self.slices)

    @property
    def fixed_s(self) -> float:
        return sum(self.busy_s[NUM_SLICED:])

    def with_slices(self, slices: float) -> list[float]:
        """The seconds of each phase with another number of slices."""
        factor = slices / max(1, self.slices)
        return [seconds * factor for seconds in self.busy_s[:NUM_SLICED]] + list(self.busy_s[NUM_SLICED:])


class Slow(NamedTuple):
    rank: int
    phase: str
    """The phase in which it loses most time."""
    factor: float
    """How many times as long as the other workers it takes for the same amount of work."""
    waiting: float
    """The fraction of a step for which the other workers wait."""


def paces_of(steps: Sequence[Sequence[Sequence[float]]], slices: Sequence[int]) -> list[Pace]:
    """From some steps' times by rank: busy seconds per phase, then seconds of waiting. `slices` has each rank's number.

    Medians, because one step that was slowed down by a disk or another program is no property of the worker.
    """
    paces = []
    for rank, count in enumerate(slices):
        *busy, waiting = (median(column) for column in zip(*(step[rank] for step in steps), strict=True))
        paces.append(Pace(count, tuple(busy), waiting))
    return paces


def slow_workers(paces: Sequence[Pace], limit: float, known: Collection[int] = ()) -> list[Slow]:
    """Workers that take more than `limit` times as long as the median of the others, for the same amount of work.

    A worker that is `known` to be slow counts as slow until it is half-way back to normal, so that it does not flap.
    """
    working = [rank for rank, pace in enumerate(paces) if pace.slices]
    if len(working) < 2:
        return []
    mean = sum(pace.slices for pace in paces) / len(working)
    times = {rank: paces[rank].with_slices(mean) for rank in working}
    found = []
    for rank in working:
        others = [other for other in working if other != rank]
        usual = median(sum(times[other]) for other in others)
        factor = sum(times[rank]) / usual if usual > 0 else 1.0
        if factor > (1 + (limit - 1) / 2 if rank in known else limit):
            excess = [times[rank][i] - median(times[other][i] for other in others) for i in range(len(PHASES))]
            waiting = median(_waiting_share(paces[other]) for other in others)
            found.append(Slow(rank, PHASES[excess.index(max(excess))], factor, waiting))
    return found


def _waiting_share(pace: Pace) -> float:
    whole = sum(pace.busy_s) + pace.waiting_s
    return pace.waiting_s / whole if whole > 0 else 0.0


def best_parts(paces: Sequence[Pace], slices: int) -> tuple[int, ...]:
    """The number of slices per worker, at least one, with which the last worker finishes as early as possible."""
    assert slices >= len(paces)
    parts = [1] * len(paces)
    ends = [(pace.fixed_s + 2 * pace.per_slice_s, rank) for rank, pace in enumerate(paces)]
    heapq.heapify(ends)
    for _ in range(slices - len(paces)):
        # Each slice in turn goes to the worker that would finish it first: no other division ends earlier.
        end, rank = ends[0]
        parts[rank] += 1
        heapq.heapreplace(ends, (end + paces[rank].per_slice_s, rank))
    return tuple(parts)


def better_parts(paces: Sequence[Pace], least_gain: float) -> tuple[int, ...] | None:
    """A division that shortens the slowest worker's step by at least this fraction; None if there is none.

    Small gains are not worth it: moving slices wastes a step's prefetched data, and times vary between steps.
    """
    slices = sum(pace.slices for pace in paces)
    if slices < len(paces) or not all(pace.slices for pace in paces):
        return None
    parts = best_parts(paces, slices)
    now_s = _makespan(paces, [pace.slices for pace in paces])
    return parts if _makespan(paces, parts) < (1 - least_gain) * now_s else None


def _makespan(paces: Sequence[Pace], parts: Sequence[int]) -> float:
    return max(pace.fixed_s + count * pace.per_slice_s for pace, count in zip(paces, parts, strict=True))
