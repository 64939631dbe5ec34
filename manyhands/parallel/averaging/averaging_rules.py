"""Averaging rules: how the weights of several workers, or their changes, are combined into one vector.

Tensors in, tensors out; `combine_ranks` does the communication, and `rounds` decides when. A combining rule takes one
flat vector per worker and returns one vector; vectors are added in order, so the same vectors give the same bits on
every machine. An outer rule moves the agreed weights. Start reading at `combine`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.parallel.averaging.rounds import Rule

__all__ = [
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


def combine(vectors: Tensor, rule: Rule, weights: Sequence[float], trim: float = 0.2) -> Tensor:
    """One vector from one per worker. Only "weighted" reads `weights`, and only "trimmed" reads `trim`."""
    match rule:
        case "mean":
            return mean(vectors)
        case "weighted":
            return weighted_mean(vectors, weights)
        case "median":
            return median(vectors)
        case "trimmed":
            return trimmed_mean(vectors, trim)


def mean(vectors: Tensor) -> Tensor:
    return weighted_mean(vectors, [1.0] * len(vectors))


def weighted_mean(vectors: Tensor, weights: Sequence[float]) -> Tensor:
    """A vector of weight 0 is left out, even if it is NaN. At least one weight must not be 0."""
    counted = [(vector, weight) for vector, weight in zip(vectors, weights, strict=True) if weight]
    assert counted, "every weight is 0: no worker contributes to the mean"
    total = torch.zeros_like(vectors[0])
    for vector, weight in counted:
        total.add_(vector, alpha=weight)
    return total.div_(sum(weight for _, weight in counted))


def median(vectors: Tensor) -> Tensor:
    """The median of each coordinate; for an even number of vectors, the mean of the two middle values."""
    ordered, middle = vectors.sort(dim=0).values, (len(vectors) - 1) // 2
    return mean(ordered[middle : len(vectors) - middle])


def trimmed_mean(vectors: Tensor, trim: float) -> Tensor:
    """The mean of each coordinate, without the fraction `trim` of its largest and of its smallest values.

    From three vectors on, at least one value is dropped at each end: a fraction that rounds to 0 would not protect.
    """
    count = min(max(1, int(trim * len(vectors))), (len(vectors) - 1) // 2)
    return mean(vectors.sort(dim=0).values[count : len(vectors) - count])


def nesterov(outer: Tensor, delta: Tensor, velocity: Tensor, *, lr: float, momentum: float) -> tuple[Tensor, Tensor]:
    """DiLoCo's outer step: the new outer weights and velocity. `delta` is the mean of (outer - worker's weights).

    With lr=1 and momentum=0 the result is the plain mean of the workers' weights.
    """
    velocity = velocity * momentum + delta
    return outer - lr * (delta + momentum * velocity), velocity


def elastic_center(center: Tensor, delta: Tensor, alpha: float, num_workers: int) -> Tensor:
    """EASGD's center after every worker has pulled it by alpha. `delta` is the mean of (center - worker's weights)."""
    return center - (alpha * num_workers) * delta


def mix(local: Tensor, outer: Tensor, alpha: float) -> Tensor:
    """The worker's new weights when the outer weights arrive some steps late: `alpha` parts local, the rest outer."""
    return alpha * local + (1.0 - alpha) * outer
