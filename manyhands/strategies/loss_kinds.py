"""Decides whether a loss is a mean over examples, from its values on some rows and on parts of these rows.

The gradient of a batch is the sum over its slices: a loss that is neither a mean over examples nor a sum with its
weight gives another result with another number of slices. Pure functions of numbers; `loss_check` measures them.

Rows are cut at two points into three parts, a, b and c. Start reading at `verdict`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["LEAST_ROWS", "Kind", "LossAtCuts", "LossValue", "agrees", "cuts", "verdict", "words"]

LEAST_ROWS = 4
"""Fewer rows cannot be cut at two points with anything left to compare."""
FINE = 0.1
"""Kinds of loss are distinguished with a smaller tolerance than the one that detects a disagreement."""

Kind = Literal["sum", "weighted mean", "mean as a sum", "coupled"]


class LossValue(NamedTuple):
    """What the loss of some rows contributes to the batch's sum and to its weight."""

    total: float
    weight: float

    @property
    def loss(self) -> float:
        return self.total / self.weight if self.weight else math.nan


@dataclass(frozen=True)
class LossAtCuts:
    """Losses of all rows, and of the parts at each of two cuts."""

    rows: tuple[int, int, int]
    """Of the parts a, b and c."""
    whole: LossValue
    a: LossValue
    bc: LossValue
    ab: LossValue
    c: LossValue
    is_pair: bool = False
    """The loss function returned a sum and its weight."""
    b: LossValue | None = None
    again: LossValue | None = None
    """All rows once more. `b` and `again` are needed only where the other values disagree."""


def cuts(rows: int) -> tuple[int, int]:
    """Where to cut so many rows: into uneven parts, for which a sum and a mean always differ."""
    third = max(1, rows // 3)
    return third, rows - third


def agrees(measured: LossAtCuts, tolerance: float) -> bool:
    """Whether the loss of all rows is the weighted mean of its parts', at both cuts."""
    found = measured.whole.loss
    expected = [_put_together(measured.a, measured.bc), _put_together(measured.ab, measured.c)]
    return all(_close(found, one, tolerance * _scale(measured)) for one in expected)


def verdict(measured: LossAtCuts, tolerance: float) -> Kind | None:
    """The kind of a loss that disagrees with its parts; None: it agrees, or nothing can be concluded."""
    values = [measured.whole, measured.a, measured.bc, measured.ab, measured.c, measured.b, measured.again]
    if not all(one is None or math.isfinite(one.loss) for one in values) or agrees(measured, tolerance):
        return None
    if measured.again is None or measured.b is None:
        return None
    if measured.whole != measured.again:
        return None  # the loss is random, or the weights have changed in between
    if measured.is_pair:
        return "mean as a sum" if _is_mean_as_sum(measured, tolerance) else "coupled"
    if _is_sum(measured, FINE * tolerance):
        return "sum"
    return "weighted mean" if _is_weighted_mean(measured, FINE * tolerance) else "coupled"


def _is_sum(measured: LossAtCuts, tolerance: float) -> bool:
    """Also True for a sum plus a term that does not depend on the rows, such as a penalty on the weights."""
    assert measured.b is not None
    near = tolerance * _scale(measured)
    first = measured.a.loss + measured.bc.loss
    return _close(first, measured.ab.loss + measured.c.loss, near) and _close(
        measured.whole.loss, measured.ab.loss + measured.bc.loss - measured.b.loss, near
    )


def _is_weighted_mean(measured: LossAtCuts, tolerance: float) -> bool:
    """Whether some non-negative weights of a, b and c explain all measured values.

    The root of a mean, and other functions of a mean, are so close to this that rounding hides the difference.
    """
    assert measured.b is not None
    a, b, c = measured.a.loss, measured.b.loss, measured.c.loss
    of_ab, of_bc = _share(a, b, measured.ab.loss), _share(b, c, measured.bc.loss)
    if of_ab is None or of_bc is None or not 0 < of_ab < 1 or not 0 < of_bc < 1:
        return False
    weights = 1.0, of_ab / (1 - of_ab), of_ab / (1 - of_ab) * of_bc / (1 - of_bc)
    expected = sum(weight * loss for weight, loss in zip(weights, (a, b, c), strict=True)) / sum(weights)
    scale = _scale(measured)
    blurred = 1 + scale / abs(b - a) + scale / abs(c - b)  # dividing by a small difference amplifies rounding errors
    return _close(measured.whole.loss, expected, tolerance * scale * blurred)


def _share(first: float, second: float, mixed: float) -> float | None:
    """The share of `second` in `mixed`, a weighted mean of both."""
    return (mixed - first) / (second - first) if second != first else None


def _is_mean_as_sum(measured: LossAtCuts, tolerance: float) -> bool:
    a, b, c = measured.rows
    first = (a * measured.a.total + (b + c) * measured.bc.total) / (a + b + c)
    second = ((a + b) * measured.ab.total + c * measured.c.total) / (a + b + c)
    near = tolerance * max(abs(first), abs(second))
    return _close(measured.whole.total, first, near) and _close(measured.whole.total, second, near)


def _put_together(first: LossValue, second: LossValue) -> float:
    return LossValue(first.total + second.total, first.weight + second.weight).loss


def _scale(measured: LossAtCuts) -> float:
    parts = (measured.whole, measured.a, measured.bc, measured.ab, measured.c)
    return max(abs(one.loss) for one in parts)


def _close(found: float, expected: float, near: float) -> bool:
    return abs(found - expected) <= near


def words(kind: Kind, measured: LossAtCuts) -> str:
    """The message for the user: the finding, with the numbers, and what to write instead."""
    (a, b, c), mixed = measured.rows, _put_together(measured.a, measured.bc)
    found = (
        f"The loss of {a + b + c} rows is {measured.whole.loss:.4g}; the losses of the first {a} of them and of the "
        f"other {b + c}, combined as means over examples, give {mixed:.4g}"
    )
    return f"{found}{_WHY[kind]} (To disable this check: check_loss=False.)"


_WHY: dict[Kind, str] = {
    "sum": (
        ". It is a sum over examples, so the result depends on the number of slices. Write losses.mean(), or return "
        "the sum with its weight: (losses.sum(), len(losses))."
    ),
    "weighted mean": (
        ". It is a mean over something other than examples, such as unmasked tokens or class weights, of which slices "
        "have more or less, so the result depends on the number of slices. Return the sum and the number: "
        "((losses * mask).sum(), mask.sum()). If it is the root of a mean, or similar: slices=4, or any fixed number."
    ),
    "mean as a sum": (
        ". The loss returns a pair (sum, weight) whose first value is a mean, so the result depends on the number of "
        "slices. Return (losses.sum(), len(losses)), or the mean alone."
    ),
    "coupled": (
        ". It couples the examples of a slice, as contrastive losses and batch statistics do, so the result depends on "
        "the number of slices. Fix that number, such as slices=4: then the result is the same for any number of "
        "workers up to it. Losses over the whole batch are coming."
    ),
}
