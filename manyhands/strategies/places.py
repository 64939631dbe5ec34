"""Whose slices are whose in a step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Places", "places_of"]


class Places(NamedTuple):
    """Of a step's slices. An empty slice contributes nothing: the tree is over those that have rows."""

    bounds: Sequence[tuple[int, int]]
    divided: Sequence[range]
    """Each rank's slices."""
    place: dict[int, int]
    """Slice -> its place among those that have rows."""
    shares: list[range]
    """Each rank's places."""


def places_of(bounds: Sequence[tuple[int, int]], shares: Sequence[range]) -> Places:
    present = [v for v, (low, high) in enumerate(bounds) if high > low]
    place = {v: number for number, v in enumerate(present)}
    owned = [[place[v] for v in share if v in place] for share in shares]
    ranges = [range(places[0], places[-1] + 1) if places else range(0) for places in owned]
    return Places(bounds, shares, place, ranges)
