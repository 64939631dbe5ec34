"""Who is slow, in which phase and by how much; and how slices should be divided then: arithmetic over measured times.

Every worker tells the others its times of each step (`step_exchange`), so all have the same numbers, come to the same
answer and need not ask each other. No clock, no torch: times in, decisions out. Start reading at `paces_of`.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from statistics import median
from typing import NamedTuple

from manyhands.parallel.replicas.phase_timer import PHASES

__all__ = ["Pace", "Slow", "best_parts", "better_parts", "paces_of", "slow_workers"]

# These phases take as long as a worker has slices; the others as long as the model is large.
NUM_SLICED = PHASES.index("backward") + 1


class Pace(NamedTuple):
    """How long one worker usually takes for its part of a step."""

    slices: int
    busy_s: tuple[float, ...]
    """At work, in each of `PHASES`."""
    waiting_s: float

    @property
    def per_slice_s(self) -> float:
        return sum(self.busy_s[:NUM_SLICED]) / max(1, self.slices)

    @property
    def fixed_s(self) -> float:
        return sum(self.busy_s[NUM_SLICED:])

    def with_slices(self, slices: float) -> list[float]:
        """What each phase would take with another number of slices."""
        factor = slices / max(1, self.slices)
        return [seconds * factor for seconds in self.busy_s[:NUM_SLICED]] + list(self.busy_s[NUM_SLICED:])


class Slow(NamedTuple):
    rank: int
    phase: str
    """Where it loses most."""
    factor: float
    """How many times as long it takes as the others, for as much work."""
    waiting: float
    """The share of a step for which the others wait."""


def paces_of(steps: Sequence[Sequence[Sequence[float]]], slices: Sequence[int]) -> list[Pace]:
    """From some steps' times, by rank: busy seconds per phase, then those of waiting. `slices` are each rank's.

    Medians, because one step in which a disk or another program was in the way says nothing about a worker.
    """
    paces = []
    for rank, count in enumerate(slices):
        *busy, waiting = (median(column) for column in zip(*(step[rank] for step in steps), strict=True))
        paces.append(Pace(count, tuple(busy), waiting))
    return paces


def slow_workers(paces: Sequence[Pace], limit: float, known: Collection[int] = ()) -> list[Slow]:
    """Workers that take more than `limit` times as long as the median of the others, for as much work.

    One that is `known` to be slow counts as slow until it is half-way back: else it would come and go.
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
    """How many slices each worker takes so that the last one is done as early as can be; one for each at least."""
    assert slices >= len(paces)
    parts = [1] * len(paces)
    ends = [(pace.fixed_s + 2 * pace.per_slice_s, rank) for rank, pace in enumerate(paces)]
    heapq.heapify(ends)
    for _ in range(slices - len(paces)):
        # One after the other to whoever would be done with it first: no other division ends earlier.
        end, rank = ends[0]
        parts[rank] += 1
        heapq.heapreplace(ends, (end + paces[rank].per_slice_s, rank))
    return tuple(parts)


def better_parts(paces: Sequence[Pace], least_gain: float) -> tuple[int, ...] | None:
    """A division in which the slowest takes less of its step, by this share at least; None where there is none.

    Moving slices costs a step's prefetched data, and times are never quite the same twice.
    """
    slices = sum(pace.slices for pace in paces)
    if slices < len(paces) or not all(pace.slices for pace in paces):
        return None
    parts = best_parts(paces, slices)
    now_s = _makespan(paces, [pace.slices for pace in paces])
    return parts if _makespan(paces, parts) < (1 - least_gain) * now_s else None


def _makespan(paces: Sequence[Pace], parts: Sequence[int]) -> float:
    return max(pace.fixed_s + count * pace.per_slice_s for pace, count in zip(paces, parts, strict=True))
