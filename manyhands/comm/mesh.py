"""Ranks in a grid with named axes: how many there are along each, where a rank is, and whom it meets on an axis.

Pure arithmetic; who connects the ranks of a line is `training.worker.worker`'s business. Neighbours in rank are
neighbours on the tensor axis first: it talks most, so it stays on one host wherever it fits there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["AXES", "Formation", "Grid", "by_slots", "in_order", "left_over", "parts_without"]

AXES = ("pipeline", "data", "tensor")
"""From the one that talks least to the one that talks most."""


class Grid(NamedTuple):
    """How many ranks there are along each axis."""

    pipeline: int = 1
    data: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        return self.pipeline * self.data * self.tensor

    def place(self, rank: int) -> Grid:
        """Where a rank is: its number on each axis."""
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return Grid(pipeline, data, tensor)


class Formation(NamedTuple):
    """Who stands where: a grid, and the place in it of each rank."""

    grid: Grid
    places: tuple[Grid, ...]

    def line(self, rank: int, *axes: str) -> list[int]:
        """The ranks that differ from this one in their places on `axes` alone; itself included, in their order."""
        mine = self.places[rank]
        fixed = [axis for axis in AXES if axis not in axes]
        met = [
            other
            for other, place in enumerate(self.places)
            if all(getattr(place, axis) == getattr(mine, axis) for axis in fixed)
        ]
        return sorted(met, key=lambda other: self.places[other])


def in_order(grid: Grid) -> Formation:
    """Ranks one after the other, as `Grid` says."""
    return Formation(grid, tuple(grid.place(rank) for rank in range(grid.size)))


def by_slots(replica: Grid, slots: Sequence[int]) -> Formation | None:
    """Where ranks die and are replaced: those of a replica have slots that follow each other; `slots` are by rank.

    So whoever takes the slot of another takes its place, and who stays, stays where it is. `replica` has a data axis
    of 1. None: there are replicas that lack somebody.
    """
    replicas = sorted({slot // replica.size for slot in slots})
    if len(slots) != len(replicas) * replica.size:
        return None
    places = (replica.place(slot % replica.size)._replace(data=replicas.index(slot // replica.size)) for slot in slots)
    return Formation(replica._replace(data=len(replicas)), tuple(places))


def left_over(replica: Grid, slots: Sequence[int]) -> list[int]:
    """Those of replicas that lack somebody."""
    there = Counter(slot // replica.size for slot in slots)
    return [slot for slot in slots if there[slot // replica.size] < replica.size]


def parts_without(replica: Grid, slots: Sequence[int]) -> list[Grid]:
    """The places of a replica that none of these slots is at, in any replica."""
    held = {slot % replica.size for slot in slots}
    return [replica.place(number) for number in range(replica.size) if number not in held]
