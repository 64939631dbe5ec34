"""Which rows a step uses, and which slices of it each worker computes: arithmetic on plain numbers.

The order of an epoch is a keyed permutation that can be computed from any position, so the sampler's whole state is
three integers and a run resumes anywhere, on any number of workers. It uses no random generator of torch or numpy, so
the order stays the same for ever (a test pins it). `as_source` and `batches` read and collate rows. Start reading at
`order`.
"""

from __future__ import annotations

import functools
from itertools import accumulate, pairwise

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = [
    "Position",
    "Rows",
    "SliceDivision",
    "mix_all",
    "num_slices",
    "order",
    "permuted",
    "slice_bounds",
    "slice_key",
    "slices_of",
]

Rows = npt.NDArray[np.int64]

_MASK_64 = 2**64 - 1
_STREAMS = {"compute": 1, "fetch": 2, "evaluate": 3}
_ROUNDS = 8
# Eight rounds of a very narrow network favour some permutations: for 5 rows, by up to twice their share.
_NARROW_BITS, _NARROW_ROUNDS = 6, 16


class Position(msgspec.Struct, frozen=True):
    """The sampler's whole state: `row` rows of epoch `epoch` (0-based) have been used."""

    seed: int
    epoch: int
    row: int


def _mix(value: int) -> int:
    """The finaliser of splitmix64: every bit of the input changes about half of the output."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def mix_all(*values: int) -> int:
    state = 0
    for value in values:
        state = _mix(state ^ (value & _MASK_64))
    return state


def slice_key(seed: int, step: int, v: int, stream: str) -> int:
    """The 63-bit key of all randomness in slice `v` of a step; each stream has separate keys."""
    return mix_all(seed, step, v, _STREAMS[stream]) >> 1


def order(num_rows: int, seed: int, epoch: int, start: int, stop: int, *, shuffle: bool = True) -> Rows:
    """Row numbers at positions [start, stop) of the epoch's order, in O(stop - start) time and memory."""
    if not shuffle:
        return np.arange(start, stop)
    return permuted(num_rows, seed, epoch, np.arange(start, stop))


def permuted(num_rows: int, seed: int, epoch: int, positions: Rows) -> Rows:
    """The row at each of these positions of the epoch's shuffled order."""
    if num_rows < 2:
        return positions.astype(np.int64)
    bits = (num_rows - 1).bit_length()
    keys = [mix_all(seed, epoch, number) for number in range(_NARROW_ROUNDS if bits <= _NARROW_BITS else _ROUNDS)]
    rows = _permute(positions.astype(np.uint64), bits, keys)
    # The network permutes [0, 2^bits). Permuting each number again until it is below num_rows permutes [0, num_rows);
    # as 2^bits < 2 * num_rows, that takes fewer than two rounds on average.
    outside = np.flatnonzero(rows >= num_rows)
    while outside.size:
        walked = _permute(rows[outside], bits, keys)
        rows[outside] = walked
        outside = outside[walked >= num_rows]
    return rows.astype(np.int64)


def _permute(numbers: npt.NDArray[np.uint64], bits: int, keys: list[int]) -> npt.NDArray[np.uint64]:
    """A Feistel network on `bits` bits; its halves may differ by one bit, as they are mixed alternately."""
    low_bits = (bits + 1) // 2
    low_mask, high_mask = np.uint64(2**low_bits - 1), np.uint64(2 ** (bits - low_bits) - 1)
    low, high = numbers & low_mask, numbers >> np.uint64(low_bits)
    for number, key in enumerate(keys):
        if number % 2:
            low ^= _round(high, key) & low_mask
        else:
            high ^= _round(low, key) & high_mask
    return (high << np.uint64(low_bits)) | low


def _round(half: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    mixed = half ^ np.uint64(key)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed >>= np.uint64(31)
    return mixed


def num_slices(rows: int, slices: int, *, short: bool) -> int:
    """Slices of a batch: V, or half its rows for a short last batch that would give a slice one row or none."""
    return max(1, rows // 2) if short and rows < 2 * slices else slices


def slice_bounds(rows: int, count: int) -> list[tuple[int, int]]:
    """Start and stop of each slice of a batch."""
    return [(v * rows // count, (v + 1) * rows // count) for v in range(count)]


def slices_of(rank: int, world_size: int, count: int) -> range:
    """The slices of a step that `rank` computes: contiguous and balanced; none for ranks from `count` on.

    If `count` is world_size times a power of two, each range is one block of the binary tree over slices.
    """
    if count <= world_size:
        return range(rank, rank + 1) if rank < count else range(0)
    return range(rank * count // world_size, (rank + 1) * count // world_size)


class SliceDivision(msgspec.Struct, frozen=True):
    """Which slices of a step each rank computes: contiguous ranges, in the order of the ranks.

    Sums follow the tree over slices, so the division never changes a result.
    """

    world_size: int
    parts: tuple[int, ...] | None = None
    """How many of a whole batch's slices each rank computes; None: evenly. Batches with fewer slices: evenly."""

    def shares(self, count: int) -> tuple[range, ...]:
        """Each rank's slices of a step with `count` slices."""
        return _shares(self, count)

    def share(self, rank: int, count: int) -> range:
        return slices_of(rank, self.world_size, count) if self.parts is None else self.shares(count)[rank]


@functools.lru_cache(maxsize=64)
def _shares(division: SliceDivision, count: int) -> tuple[range, ...]:
    parts, world_size = division.parts, division.world_size
    if parts is None or sum(parts) != count:
        return tuple(slices_of(rank, world_size, count) for rank in range(world_size))
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(parts, initial=0)))
