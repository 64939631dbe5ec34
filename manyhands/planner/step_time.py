"""The time of a step by the number of hosts and workers, fitted to the steps that were observed. Pure arithmetic.

    t(hosts, workers) = constant + compute / workers + exchange + crossing + hosts_cost * log2(hosts),
    exchange only for workers > 1, crossing only for hosts > 1

No term is negative, and there is always some computation: no step is predicted to take no time. What was not observed
is assumed to cost nothing: a job that ran on one worker only is expected to scale perfectly, until it is seen on two.
Start reading at `fit_step_time`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

__all__ = ["ObservedSteps", "StepTime", "fit_step_time", "nonnegative_least_squares"]

# Of the assumption that a term is 0, relative to one observation of the step time. Observations outweigh it; where they
# leave a choice, computation explains most, then the way between hosts.
PRIOR_WEIGHTS = (0.1, 0.0, 0.1, 0.005, 0.01)
# Worker seconds of computation, at least, as part of the fastest step that was observed.
LEAST_COMPUTE = 0.1
TINY = 1e-12


class ObservedSteps(msgspec.Struct, frozen=True):
    """Steps that a job took on so many hosts with so many workers in all."""

    hosts: int
    workers: int
    steps: float
    seconds: float

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps


class StepTime(msgspec.Struct, frozen=True):
    constant: float
    compute: float
    exchange: float = 0.0
    crossing: float = 0.0
    hosts_cost: float = 0.0

    def at(self, hosts: int, workers: int) -> float:
        """Predicted seconds of a step."""
        return sum(one * cost for one, cost in zip(_features(hosts, workers), self._costs(), strict=True))

    def _costs(self) -> tuple[float, ...]:
        return self.constant, self.compute, self.exchange, self.crossing, self.hosts_cost


def _features(hosts: int, workers: int) -> tuple[float, ...]:
    return 1.0, 1.0 / workers, float(workers > 1), float(hosts > 1), math.log2(hosts)


def fit_step_time(observed: Iterable[ObservedSteps]) -> StepTime | None:
    """The model that fits the observations best, each by its relative error; None without any."""
    points = [one for one in observed if one.steps > 0 and one.seconds > 0]
    if not points:
        return None
    scale = min(one.step_s for one in points)
    rows = [[value / one.step_s * scale for value in _features(one.hosts, one.workers)] for one in points]
    wanted = [1.0 - LEAST_COMPUTE * row[1] for row in rows]
    for term, weight in enumerate(PRIOR_WEIGHTS):
        rows.append([weight * (term == column) for column in range(len(PRIOR_WEIGHTS))])
        wanted.append(0.0)
    constant, compute, *others = nonnegative_least_squares(rows, wanted)
    return StepTime(scale * constant, scale * (LEAST_COMPUTE + compute), *(scale * cost for cost in others))


def nonnegative_least_squares(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """The x >= 0 with the smallest |rows x - wanted|, by the active-set method of Lawson and Hanson."""
    width = len(rows[0])
    normal = [[sum(row[i] * row[j] for row in rows) for j in range(width)] for i in range(width)]
    target = [sum(row[i] * value for row, value in zip(rows, wanted, strict=True)) for i in range(width)]
    found, free = [0.0] * width, set[int]()
    tolerance = TINY * max(1.0, *(abs(value) for value in target))
    for _ in range(3 * width):
        slope = [target[i] - sum(normal[i][j] * found[j] for j in range(width)) for i in range(width)]
        bound = [i for i in range(width) if i not in free and slope[i] > tolerance]
        if not bound:
            break
        free.add(max(bound, key=lambda i: slope[i]))
        found = _solve_inside(normal, target, found, free)
    return found


def _solve_inside(normal: list[list[float]], target: list[float], found: list[float], free: set[int]) -> list[float]:
    """Go towards the least squares of the free terms; a term that would become negative is 0 and no longer free."""
    while free:
        best = _solve(normal, target, sorted(free))
        negative = [i for i in free if best[i] <= 0]
        if not negative:
            return best
        steps = {i: found[i] / (found[i] - best[i]) if found[i] > best[i] else 0.0 for i in negative}
        part = min(steps.values())
        found = [value + part * (best[i] - value) if i in free else 0.0 for i, value in enumerate(found)]
        free -= {i for i in negative if steps[i] <= part}
        found = [value if i in free else 0.0 for i, value in enumerate(found)]
    return [0.0] * len(found)


def _solve(normal: list[list[float]], target: list[float], free: list[int]) -> list[float]:
    """Gaussian elimination with the largest pivot; a term that the others determine is 0."""
    rows = [[normal[i][j] for j in free] + [target[i]] for i in free]
    size, largest = len(free), max(abs(normal[i][i]) for i in free)
    for column in range(size):
        pivot = max(range(column, size), key=lambda i: abs(rows[i][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        if abs(rows[column][column]) <= TINY * largest:
            rows[column] = [float(column == j) for j in range(size)] + [0.0]
        for other in range(size):
            if other != column:
                factor = rows[other][column] / rows[column][column]
                rows[other] = [a - factor * b for a, b in zip(rows[other], rows[column], strict=True)]
    solved = [0.0] * len(target)
    for place, i in enumerate(free):
        solved[i] = rows[place][-1] / rows[place][place]
    return solved
