"""From seconds per step to a verdict: medians, the ratio of two sides, and how far it can be trusted.

Every block of ours has a block of the peer and one of the peer's twin beside it. The ratio is taken within such a
round, so that a slow minute of the machine cancels out; its median and a bootstrap interval are reported. The twin's
ratio to the peer is the A/A control: what the method says where there is no difference.

Where memory happens to lie favours a side for a whole launch, which no number of blocks in it averages out. So blocks
come from several launches, and the interval resamples launches first, then the blocks within each.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any

__all__ = ["compare", "divide"]

RESAMPLES = 2000

Launch = Mapping[str, Sequence[float]]
"""Seconds per step of each block, by side."""


def compare(launches: Sequence[Launch], ours: str, peer: str, twin: str, allowed: float) -> dict[str, Any]:
    """What the blocks say. `allowed` is how much slower than the peer is still within the target: 0.02 is 2 %."""
    rounds = [list(zip(seconds[ours], seconds[peer], seconds[twin], strict=True)) for seconds in launches]
    found = _summary([[mine / ((theirs + again) / 2) for mine, theirs, again in launch] for launch in rounds])
    control = _summary([[again / theirs for _, theirs, again in launch] for launch in rounds])
    limit = 1.0 + allowed + abs(control["median"] - 1.0)
    return {
        "launches": len(rounds),
        "blocks": sum(map(len, rounds)),
        "ms_per_step": {side: _milliseconds(_pooled(launches, side)) for side in (ours, peer, twin)},
        "ratio": found,
        "control": control,
        "limit": limit,
        "met": found["median"] <= limit,
    }


def divide(num_blocks: int, num_launches: int) -> list[int]:
    """Blocks per launch; no launch without any."""
    num_launches = max(1, min(num_launches, num_blocks))
    return [num_blocks * (i + 1) // num_launches - num_blocks * i // num_launches for i in range(num_launches)]


def _pooled(launches: Sequence[Launch], side: str) -> list[float]:
    return [value for seconds in launches for value in seconds[side]]


def _milliseconds(values: Sequence[float]) -> dict[str, float]:
    low, _, high = quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return {"median": 1e3 * median(values), "lower_quartile": 1e3 * low, "upper_quartile": 1e3 * high}


def _summary(launches: Sequence[Sequence[float]]) -> dict[str, float]:
    """The median of all rounds, and an interval that holds it in 95 of 100 resamplings of launches and rounds."""
    draw = random.Random(0)
    medians = sorted(median(_resampled(launches, draw)) for _ in range(RESAMPLES))
    cut = RESAMPLES // 40
    return {"median": median(x for launch in launches for x in launch), "low": medians[cut], "high": medians[-cut - 1]}


def _resampled(launches: Sequence[Sequence[float]], draw: random.Random) -> list[float]:
    return [x for launch in draw.choices(launches, k=len(launches)) for x in draw.choices(launch, k=len(launch))]
