"""Sample orders other than a plain shuffle: by weight, and by length.

Each is a function of (seed, epoch, position), like `sample_order.order`: a run resumes anywhere, on any number of
workers. The arithmetic is exactly rounded everywhere (no library's logarithm, no library's generator), so that workers
on different machines draw the same rows. Users find them as `mh.order`. Start reading at `Weighted.rows`.
"""

from __future__ import annotations

import zlib
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from manyhands.data.sample_order import Rows, mix_all, order
from manyhands.errors import DataError

__all__ = ["ByLength", "Order", "Weighted"]

Numbers = npt.NDArray[np.float64]

# One key per kind of draw, so that no two kinds draw the same numbers.
_DRAWS, _BATCHES, _SHORT = 101, 102, 103


class Order(Protocol):
    """Which row is at each position of an epoch."""

    def num_positions(self) -> int:
        """Number of rows in an epoch."""

    def rows(self, batch_size: int, seed: int, epoch: int, start: int, stop: int) -> Rows:
        """The rows at positions [start, stop)."""

    def part(self, start: int, stop: int) -> Order:
        """The same for rows [start, stop) of the data, as separate data."""

    def check(self, num_rows: int) -> None:
        """`DataError` if it was not made for data with `num_rows` rows."""

    def identity(self, batch_size: int = 0) -> str:
        """Differs if the row at any position differs."""

    def describe(self) -> str: ...


class Weighted:
    """Rows drawn in proportion to their weights, as torch's `WeightedRandomSampler` draws them.

    An epoch has `num_samples` rows; default: as many as there are weights. With `replacement` each position is an
    independent draw, so some rows occur several times in an epoch and some not at all. Without, a row occurs at most
    once: each draw is in proportion to the weights of the remaining rows.

    Args:
        weights: One number for each row, 0 or more. They need not sum to 1; a row of weight 0 is never drawn.
        num_samples: Rows of an epoch. Default: as many as there are weights.
        replacement: Whether a row may occur several times in an epoch.
    """

    def __init__(self, weights: Any, num_samples: int | None = None, replacement: bool = True) -> None:
        self.weights = _numbers(weights, "weights")
        self._given, self.replacement = num_samples, replacement
        if num_samples is not None and (isinstance(num_samples, bool) or int(num_samples) != num_samples):
            raise DataError(f"num_samples is {num_samples!r}.", where="mh.order.Weighted", fix=["num_samples=1000"])
        self.num_samples = len(self.weights) if num_samples is None else int(num_samples)
        if (self.weights < 0).any() or not self.weights.any():
            raise DataError(
                "Weights must be 0 or more, and one of them above 0.", where="mh.order.Weighted", fix=["weights >= 0"]
            )
        self._cumulated = np.cumsum(self.weights)  # sequential addition: the same bits everywhere
        self._last = int(np.flatnonzero(self.weights)[-1])
        self._drawn: tuple[tuple[int, int], Rows] | None = None
        self._check_count()

    def _check_count(self) -> None:
        if self.num_samples < 1:
            what = f"num_samples is {self.num_samples}, but an epoch has at least one row."
            raise DataError(what, where="mh.order.Weighted", fix=[f"num_samples={len(self.weights)}"])
        num_candidates = int(np.count_nonzero(self.weights))
        if not self.replacement and self.num_samples > num_candidates:
            raise DataError(
                f"num_samples is {self.num_samples}, but only {num_candidates} rows have a weight above 0, and without "
                "replacement each is drawn at most once.",
                where="mh.order.Weighted",
                fix=[f"num_samples={num_candidates}", "replacement=True"],
            )

    def num_positions(self) -> int:
        return self.num_samples

    def rows(self, batch_size: int, seed: int, epoch: int, start: int, stop: int) -> Rows:
        if not self.replacement:
            return self._without_replacement(seed, epoch)[start:stop]
        draws = _uniform(mix_all(seed, epoch, _DRAWS), np.arange(start, stop, dtype=np.uint64))
        found = np.searchsorted(self._cumulated, draws * self._cumulated[-1], side="right")
        drawn: Rows = np.minimum(found, self._last).astype(np.int64)  # a product may round up to the sum
        return drawn

    def _without_replacement(self, seed: int, epoch: int) -> Rows:
        """All rows of an epoch, sorted by exponential times whose rates are the weights."""
        known = self._drawn
        if known is None or known[0] != (seed, epoch):
            candidates = np.flatnonzero(self.weights)
            draws = _uniform(mix_all(seed, epoch, _DRAWS), candidates.astype(np.uint64))
            times = -_log(1.0 - draws) / self.weights[candidates]
            self._drawn = known = (seed, epoch), candidates[np.argsort(times, kind="stable")[: self.num_samples]]
        return known[1]

    def part(self, start: int, stop: int) -> Weighted:
        return Weighted(self.weights[start:stop], self._given, self.replacement)

    def check(self, num_rows: int) -> None:
        _check_length("weights", len(self.weights), num_rows, "mh.order.Weighted")

    def identity(self, batch_size: int = 0) -> str:
        return f"Weighted {zlib.crc32(self.weights.tobytes()):08x} {self.num_samples} {self.replacement}"

    def describe(self) -> str:
        return f"{self.num_samples} draws per epoch by weight, {'with' if self.replacement else 'without'} replacement"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_drawn": None}


class ByLength:
    """Shuffled, with rows of about the same length in a batch: less padding. (Bucket batching.)

    An epoch uses every row once. In the shuffled order, the rows of each `window` batches are sorted by length and cut
    into batches, which are shuffled among themselves. A larger window pads less; a smaller one is closer to a plain
    shuffle. The rows of a batch are sorted by length, so that slices, which are padded separately, need less padding,
    too.

    Args:
        lengths: One number for each row.
        window: Number of batches whose rows are sorted together.
    """

    def __init__(self, lengths: Any, window: int = 50) -> None:
        self.lengths, self.window = _numbers(lengths, "lengths"), window
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise DataError(
                f"window is {window!r}, but must be a number of batches, at least 1.",
                where="mh.order.ByLength",
                fix=["window=50"],
            )

    def num_positions(self) -> int:
        return len(self.lengths)

    def rows(self, batch_size: int, seed: int, epoch: int, start: int, stop: int) -> Rows:
        size = self.window * batch_size
        first, last = start // size, -(-stop // size)
        found = [self._window(number, batch_size, seed, epoch) for number in range(first, last)]
        return np.concatenate(found)[start - first * size : stop - first * size] if found else np.empty(0, np.int64)

    def _window(self, number: int, batch_size: int, seed: int, epoch: int) -> Rows:
        start = number * self.window * batch_size
        stop = min(len(self.lengths), start + self.window * batch_size)
        shuffled = order(len(self.lengths), seed, epoch, start, stop)
        ordered = shuffled[np.argsort(self.lengths[shuffled], kind="stable")]
        whole, rest = divmod(stop - start, batch_size)
        # The short batch of an epoch is its last, regardless of the length of its rows.
        short = mix_all(seed, epoch, number, _SHORT) % (whole + 1) if rest else whole
        begins = [batch * batch_size + (rest if batch >= short else 0) for batch in range(whole)]
        batch_order = order(whole, mix_all(seed, epoch, _BATCHES), number, 0, whole)
        batches = [ordered[begins[batch] : begins[batch] + batch_size] for batch in batch_order]
        if rest:
            batches.append(ordered[short * batch_size : short * batch_size + rest])
        return np.concatenate(batches)

    def part(self, start: int, stop: int) -> ByLength:
        return ByLength(self.lengths[start:stop], self.window)

    def check(self, num_rows: int) -> None:
        _check_length("lengths", len(self.lengths), num_rows, "mh.order.ByLength")

    def identity(self, batch_size: int = 0) -> str:
        return f"ByLength {zlib.crc32(self.lengths.tobytes()):08x} {self.window} {batch_size}"

    def describe(self) -> str:
        return f"shuffled, rows of similar length together in a batch (within {self.window} batches)"


def _numbers(values: Any, name: str) -> Numbers:
    array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    if array.ndim != 1 or array.dtype.kind not in "biuf" or not len(array) or not np.isfinite(array).all():
        raise DataError(
            f"{name} must be one finite number per row, but this is {array.dtype} of shape {array.shape}.",
            where="mh.order",
            fix=[f"{name}=[one number for each row of the data]"],
        )
    return array.astype(np.float64)


def _check_length(name: str, given: int, num_rows: int, where: str) -> None:
    if given != num_rows:
        raise DataError(
            f"There are {given} {name}, but the data has {num_rows} rows.", where=where, fix=[f"{num_rows} {name}"]
        )


def _uniform(key: int, numbers: npt.NDArray[np.uint64]) -> Numbers:
    """In [0, 1), in steps of 2^-53: the finaliser of splitmix64 on a sequence that starts at the key."""
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _log(numbers: Numbers) -> Numbers:
    """The logarithm from exactly rounded operations only: library versions differ in the last bit between machines."""
    fractions, exponents = np.frexp(numbers)  # in [0.5, 1)
    low = fractions < 0.7071067811865476
    fractions, exponents = np.where(low, 2 * fractions, fractions), exponents - low
    ratio = (fractions - 1) / (fractions + 1)  # at most 0.172, so that 12 terms are enough
    square, total = ratio * ratio, np.zeros_like(ratio)
    for power in range(23, 0, -2):
        total = total * square + 1.0 / power
    found: Numbers = 2 * ratio * total + exponents * 0.6931471805599453
    return found
