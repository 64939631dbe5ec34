"""The orders of `shuffle` and `interleave` as arithmetic on positions: no data, no library's random generator.

Each is a function of a key, so it is the same on every worker, in every loader process and after a resume, and stays
the same for ever (a test pins it). `sample_order.permuted` is the order of a full shuffle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from manyhands.data.sample_order import Rows

__all__ = ["buffered_order", "draws", "interleaved_order"]

_DRAWN_TOGETHER = 4096


def draws(key: int) -> Iterator[int]:
    """Endless 64-bit numbers: splitmix64, which starts at the key."""
    start = 0
    while True:
        numbers = np.arange(start + 1, start + 1 + _DRAWN_TOGETHER, dtype=np.uint64)
        mixed = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        yield from (mixed ^ (mixed >> np.uint64(31))).tolist()
        start += _DRAWN_TOGETHER


def buffered_order(count: int, buffer: int, key: int) -> Rows:
    """`range(count)` through a shuffle buffer: one of the buffer's elements is drawn, and the next one takes its place.

    The last element takes the place of one that is drawn when nothing follows; `streams` draws in the same way.
    """
    held, found, numbers = list(range(min(buffer, count))), np.empty(count, np.int64), draws(key)
    for position in range(count):
        place = next(numbers) % len(held)
        found[position] = held[place]
        following = position + buffer
        if following < count:
            held[place] = following
        else:
            held[place] = held[-1]
            held.pop()
    return found


def interleaved_order(lengths: Sequence[int], cycle: int, block: int) -> tuple[Rows, Rows]:
    """Which data set each element of an interleave is from, and its position there.

    As in tf.data: `cycle` data sets are open at a time; `block` elements are taken from each in turn. A place whose
    data set has ended is passed over once, and has the next data set when it is reached again.
    """
    runs: list[tuple[int, int, int]] = []
    places: list[tuple[int, int] | None] = [None] * cycle
    upcoming, num_open, place = 0, 0, 0
    while upcoming < len(lengths) or num_open:
        entry = places[place]
        if entry is None and upcoming < len(lengths):
            entry, upcoming, num_open = (upcoming, 0), upcoming + 1, num_open + 1
        if entry is not None:
            number, start = entry
            taken = min(block, lengths[number] - start)
            runs.append((number, start, taken))
            # A data set that ends with its block is found to have ended only when its place is reached again.
            has_ended = taken < block
            places[place], num_open = (None if has_ended else (number, start + taken)), num_open - has_ended
        place = (place + 1) % cycle
    which = [np.full(taken, number, np.int64) for number, _, taken in runs]
    where = [np.arange(start, start + taken) for _, start, taken in runs]
    empty = [np.empty(0, np.int64)]
    return np.concatenate(which or empty), np.concatenate(where or empty)
