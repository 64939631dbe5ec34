"""From measured blocks to a ratio of two sides, with a confidence interval.

Every block of ours is measured next to a block of the peer and one of the peer's twin. The ratio is taken within such a
round, so that a slow minute of the machine cancels out; its median and a bootstrap interval are reported. The twin's
ratio to the peer is the A/A control: what the method reports where there is no difference.

The addresses of memory may favour a side for a whole launch, which no number of blocks in it averages out. So blocks
come from several launches, and the interval resamples launches first, then the blocks within each.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median, quantiles
from typing import Any, NamedTuple

from bench.results.table import Row, verdict

__all__ = ["Launch", "Measured", "Size", "divide", "judge"]

RESAMPLES = 2000
SCALES = {"s": 1.0, "ms": 1e3, "us": 1e6, "MB": 1e-6, "%": 100.0, "nats": 1.0}

Launch = Mapping[str, Sequence[float]]
"""Per side, the value of each block: seconds per step, bytes, or a share."""
Average = Callable[[Sequence[float]], float]


class Size(NamedTuple):
    """How much to measure."""

    num_blocks: int
    """Per side, over all launches."""
    block_s: float
    launches: int


class Measured(NamedTuple):
    """What a benchmark measured, before it is compared with the target."""

    launches: Sequence[Launch]
    settings: Mapping[str, Any]


def divide(size: Size) -> list[int]:
    """Blocks per launch; no launch without any."""
    launches = max(1, min(size.launches, size.num_blocks))
    return [size.num_blocks * (i + 1) // launches - size.num_blocks * i // launches for i in range(launches)]


def judge(row: Row, measured: Measured) -> dict[str, Any]:
    """A row's result: medians of its sides, the value that its target is about, and the verdict."""
    if not row.target.is_ratio:
        return _judge_alone(row, measured)
    launches, sides = measured.launches, [side for side in (row.ours, row.peer, row.twin) if side is not None]
    rounds = [list(zip(*(launch[side] for side in sides), strict=True)) for launch in launches]
    # A twin halves the peer's noise: the peer of a round is the mean of both.
    value = [[_value(row.target.of, mine, fmean(theirs)) for mine, *theirs in launch] for launch in rounds]
    # Accuracies are multiples of one picture, and so would be their median.
    found = _summary(value, fmean if row.target.of == "points" else median)
    control = _summary([[again / theirs for _, theirs, again in launch] for launch in rounds]) if row.twin else None
    scale = SCALES[row.unit]
    return {
        "row": row.name,
        "bench": row.bench,
        "what": row.what,
        "against": row.peer,
        **measured.settings,
        "launches": len(rounds),
        "blocks": sum(map(len, rounds)),
        "unit": row.unit,
        "sides": {side: _spread([scale * x for launch in launches for x in launch[side]]) for side in sides},
        "value": found,
        "control": control,
        **verdict(row.target, found, control),
    }


def _judge_alone(row: Row, measured: Measured) -> dict[str, Any]:
    """The same for a target in absolute numbers. The peer's numbers are reported with it, if there are any."""
    launches, scale = measured.launches, SCALES[row.unit]
    found = _summary([launch[row.ours] for launch in launches], _ninety_five if row.target.of == "p95" else median)
    sides = {side: [x for launch in launches for x in launch.get(side, ())] for side in (row.ours, row.peer)}
    return {
        "row": row.name,
        "bench": row.bench,
        "what": row.what,
        "against": row.peer,
        **measured.settings,
        "launches": len(launches),
        "blocks": len(sides[row.ours]),
        "unit": row.unit,
        "sides": {side: _spread([scale * x for x in values]) for side, values in sides.items() if values},
        "value": found,
        "control": None,
        **verdict(row.target, found, None),
    }


def _ninety_five(values: Sequence[float]) -> float:
    """The 95th percentile: the next larger measured value."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def _value(of: str, ours: float, peer: float) -> float:
    match of:
        case "speed":
            return peer / ours
        case "points":
            return 100.0 * (peer - ours)
    return ours / peer


def _spread(values: Sequence[float]) -> dict[str, float]:
    low, _, high = quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return {"median": median(values), "lower_quartile": low, "upper_quartile": high}


def _summary(launches: Sequence[Sequence[float]], average: Average = median) -> dict[str, float]:
    """The middle of all rounds, and an interval that holds it in 95 of 100 resamplings of launches and rounds."""
    draw = random.Random(0)
    again = sorted(average(_resampled(launches, draw)) for _ in range(RESAMPLES))
    cut = RESAMPLES // 40
    return {"middle": average([x for launch in launches for x in launch]), "low": again[cut], "high": again[-cut - 1]}


def _resampled(launches: Sequence[Sequence[float]], draw: random.Random) -> list[float]:
    return [x for launch in draw.choices(launches, k=len(launches)) for x in draw.choices(launch, k=len(launch))]
