"""From seconds per step to a verdict: medians, the ratio of two sides, and how far it can be trusted.

Every block of ours has a block of the peer and one of the peer's twin beside it. The ratio is taken within such a
round, so that a slow minute of the machine cancels out; its median and a bootstrap interval are reported. The twin's
ratio to the peer is the A/A control: what the method says where there is no difference.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any

__all__ = ["compare"]

RESAMPLES = 2000


def compare(seconds: Mapping[str, Sequence[float]], ours: str, peer: str, twin: str, allowed: float) -> dict[str, Any]:
    """What the blocks say. `allowed` is how much slower than the peer is still within the target: 0.02 is 2 %."""
    rounds = list(zip(seconds[ours], seconds[peer], seconds[twin], strict=True))
    ratios = [mine / ((theirs + again) / 2) for mine, theirs, again in rounds]
    control = _summary([again / theirs for _, theirs, again in rounds])
    found = _summary(ratios)
    limit = 1.0 + allowed + abs(control["median"] - 1.0)
    return {
        "blocks": len(rounds),
        "ms_per_step": {name: _milliseconds(values) for name, values in seconds.items()},
        "ratio": found,
        "control": control,
        "limit": limit,
        "met": found["median"] <= limit,
    }


def _milliseconds(values: Sequence[float]) -> dict[str, float]:
    low, _, high = quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return {"median": 1e3 * median(values), "lower_quartile": 1e3 * low, "upper_quartile": 1e3 * high}


def _summary(ratios: Sequence[float]) -> dict[str, float]:
    """The median and an interval that holds it in 95 of 100 resamplings."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    cut = RESAMPLES // 40
    return {"median": median(ratios), "low": medians[cut], "high": medians[-cut - 1]}
