"""Averaging rules: what several workers' weights, or how far each has moved, become together.

Tensors in, tensors out; who sends them where is `combine_ranks`'s business, and when is `rounds`'. A combining rule
takes one row per worker and gives one row; rows are added in order, so the same rows give the same bits on every
machine. An outer rule moves the weights that all agree on. Start reading at `combine`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.parallel.averaging.rounds import Rule

__all__ = [
    "OUTER_LR",
    "OUTER_MOMENTUM",
    "Rule",
    "combine",
    "elastic_center",
    "mean",
    "median",
    "mix",
    "nesterov",
    "trimmed_mean",
    "weighted_mean",
]

# What the authors of DiLoCo found best for its outer step.
OUTER_LR = 0.7
OUTER_MOMENTUM = 0.9


def combine(rows: Tensor, rule: Rule, weights: Sequence[float], trim: float = 0.2) -> Tensor:
    """One row from one per worker. `weights` count for "weighted" alone, `trim` for "trimmed"."""
    match rule:
        case "mean":
            return mean(rows)
        case "weighted":
            return weighted_mean(rows, weights)
        case "median":
            return median(rows)
        case "trimmed":
            return trimmed_mean(rows, trim)


def mean(rows: Tensor) -> Tensor:
    return weighted_mean(rows, [1.0] * len(rows))


def weighted_mean(rows: Tensor, weights: Sequence[float]) -> Tensor:
    """A weight of 0 leaves a row out altogether, were it NaN; all of 0 leave nothing to divide by."""
    counted = [(row, weight) for row, weight in zip(rows, weights, strict=True) if weight]
    assert counted, "nobody has anything to contribute"
    total = torch.zeros_like(rows[0])
    for row, weight in counted:
        total.add_(row, alpha=weight)
    return total.div_(sum(weight for _, weight in counted))


def median(rows: Tensor) -> Tensor:
    """Of each coordinate by itself; of an even number of rows, the mean of the two in the middle."""
    ordered, middle = rows.sort(dim=0).values, (len(rows) - 1) // 2
    return mean(ordered[middle : len(rows) - middle])


def trimmed_mean(rows: Tensor, trim: float) -> Tensor:
    """Of each coordinate, without the fraction `trim` of its largest and of its smallest values.

    At least one of each goes, where three rows or more are there: a fraction that rounds to nobody protects nobody.
    """
    count = min(max(1, int(trim * len(rows))), (len(rows) - 1) // 2)
    return mean(rows.sort(dim=0).values[count : len(rows) - count])


def nesterov(
    outer: Tensor, delta: Tensor, velocity: Tensor, *, lr: float = OUTER_LR, momentum: float = OUTER_MOMENTUM
) -> tuple[Tensor, Tensor]:
    """DiLoCo's outer step, and the velocity after it. `delta` is the mean of (outer - worker's weights).

    With lr=1 and momentum=0 it is the plain mean of the workers' weights.
    """
    velocity = velocity * momentum + delta
    return outer - lr * (delta + momentum * velocity), velocity


def elastic_center(center: Tensor, delta: Tensor, alpha: float, num_workers: int) -> Tensor:
    """EASGD's, after all workers have pulled at it by alpha: `delta` is the mean of (center - worker's weights)."""
    return center - (alpha * num_workers) * delta


def mix(local: Tensor, outer: Tensor, alpha: float) -> Tensor:
    """What a worker goes on with when combined weights arrive some steps late: `alpha` of its own, the rest of them."""
    return alpha * local + (1.0 - alpha) * outer
