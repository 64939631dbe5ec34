"""Whether a loss is a mean over examples, decided from what it came to on some rows and on parts of them.

The gradient of a batch is put together from its slices: a loss that is no mean over examples, and no sum with its
weight, gives another result with another number of slices. Numbers in, a verdict out; `loss_check` measures.

Rows are cut in two places into three parts, a, b and c. Start reading at `verdict`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["LEAST_ROWS", "Kind", "Measured", "Value", "agrees", "cuts", "verdict", "words"]

LEAST_ROWS = 4
"""Fewer rows cannot be cut in two places so that there is something to compare."""
FINE = 0.1
"""Kinds are told apart by less than the tolerance that finds out that there is something to tell apart."""

Kind = Literal["sum", "weighted mean", "mean as a sum", "coupled"]


class Value(NamedTuple):
    """What the loss of some rows adds to the batch's sum and to its weight."""

    total: float
    weight: float

    @property
    def loss(self) -> float:
        return self.total / self.weight if self.weight else math.nan


@dataclass(frozen=True)
class Measured:
    """Losses of all rows, and of the parts at each of two cuts."""

    rows: tuple[int, int, int]
    """Of the parts a, b and c."""
    whole: Value
    a: Value
    bc: Value
    ab: Value
    c: Value
    is_pair: bool = False
    """The loss function returned a sum and its weight."""
    b: Value | None = None
    again: Value | None = None
    """All rows once more. These two are of use only where the others do not agree."""


def cuts(rows: int) -> tuple[int, int]:
    """Where to cut so many rows: uneven parts, as a sum and a mean agree on nothing there."""
    third = max(1, rows // 3)
    return third, rows - third


def agrees(measured: Measured, tolerance: float) -> bool:
    """Whether the loss of all rows is the weighted mean of its parts', at both cuts."""
    found = measured.whole.loss
    expected = [_put_together(measured.a, measured.bc), _put_together(measured.ab, measured.c)]
    return all(_close(found, one, tolerance * _scale(measured)) for one in expected)


def verdict(measured: Measured, tolerance: float) -> Kind | None:
    """What kind of loss it is that does not agree with its parts; None: it does, or nothing can be said."""
    values = [measured.whole, measured.a, measured.bc, measured.ab, measured.c, measured.b, measured.again]
    if not all(one is None or math.isfinite(one.loss) for one in values) or agrees(measured, tolerance):
        return None
    if measured.again is None or measured.b is None:
        return None
    if measured.whole != measured.again:
        return None  # it draws something at random, or the weights have changed meanwhile
    if measured.is_pair:
        return "mean as a sum" if _is_mean_as_sum(measured, tolerance) else "coupled"
    if _is_sum(measured, FINE * tolerance):
        return "sum"
    return "weighted mean" if _is_weighted_mean(measured, FINE * tolerance) else "coupled"


def _is_sum(measured: Measured, tolerance: float) -> bool:
    """Also with something added that does not depend on the rows, such as a penalty on the weights."""
    assert measured.b is not None
    near = tolerance * _scale(measured)
    first = measured.a.loss + measured.bc.loss
    return _close(first, measured.ab.loss + measured.c.loss, near) and _close(
        measured.whole.loss, measured.ab.loss + measured.bc.loss - measured.b.loss, near
    )


def _is_weighted_mean(measured: Measured, tolerance: float) -> bool:
    """Whether some weights of a, b and c, none of them negative, explain all that was measured.

    The root of a mean, and other functions of it, are so near to that that rounding hides the difference.
    """
    assert measured.b is not None
    a, b, c = measured.a.loss, measured.b.loss, measured.c.loss
    of_ab, of_bc = _share(a, b, measured.ab.loss), _share(b, c, measured.bc.loss)
    if of_ab is None or of_bc is None or not 0 < of_ab < 1 or not 0 < of_bc < 1:
        return False
    weights = 1.0, of_ab / (1 - of_ab), of_ab / (1 - of_ab) * of_bc / (1 - of_bc)
    expected = sum(weight * loss for weight, loss in zip(weights, (a, b, c), strict=True)) / sum(weights)
    scale = _scale(measured)
    blurred = 1 + scale / abs(b - a) + scale / abs(c - b)  # what is divided by a small difference is known less well
    return _close(measured.whole.loss, expected, tolerance * scale * blurred)


def _share(first: float, second: float, mixed: float) -> float | None:
    """How much of the second is in what was mixed of both."""
    return (mixed - first) / (second - first) if second != first else None


def _is_mean_as_sum(measured: Measured, tolerance: float) -> bool:
    a, b, c = measured.rows
    first = (a * measured.a.total + (b + c) * measured.bc.total) / (a + b + c)
    second = ((a + b) * measured.ab.total + c * measured.c.total) / (a + b + c)
    near = tolerance * max(abs(first), abs(second))
    return _close(measured.whole.total, first, near) and _close(measured.whole.total, second, near)


def _put_together(first: Value, second: Value) -> float:
    return Value(first.total + second.total, first.weight + second.weight).loss


def _scale(measured: Measured) -> float:
    parts = (measured.whole, measured.a, measured.bc, measured.ab, measured.c)
    return max(abs(one.loss) for one in parts)


def _close(found: float, expected: float, near: float) -> bool:
    return abs(found - expected) <= near


def words(kind: Kind, measured: Measured) -> str:
    """What was found, with the numbers, and what to write instead."""
    (a, b, c), mixed = measured.rows, _put_together(measured.a, measured.bc)
    found = (
        f"The loss of {a + b + c} rows is {measured.whole.loss:.4g}; the losses of the first {a} of them and of the "
        f"other {b + c}, put together as means over examples, come to {mixed:.4g}"
    )
    return f"{found}{_WHY[kind]} (check_loss=False: no such check.)"


_WHY: dict[Kind, str] = {
    "sum": (
        ". It is a sum over examples, so the result depends on the number of slices. Write losses.mean(), or return "
        "the sum with its weight: (losses.sum(), len(losses))."
    ),
    "weighted mean": (
        ". It is a mean over something other than examples, such as tokens that are not masked or class weights, of "
        "which slices have more or less, so the result depends on the number of slices. Return the sum and the number: "
        "((losses * mask).sum(), mask.sum()). If it is the root of a mean, or the like: slices=4, or any fixed number."
    ),
    "mean as a sum": (
        ". The loss returns a pair (sum, weight) whose first value is a mean, so the result depends on the number of "
        "slices. Return (losses.sum(), len(losses)), or the mean alone."
    ),
    "coupled": (
        ". It couples the examples of a slice, as contrastive losses and batch statistics do, so the result depends on "
        "the number of slices. Fix that number, such as slices=4: then it is the same for any number of workers up to "
        "it. Losses over the whole batch are coming."
    ),
}
