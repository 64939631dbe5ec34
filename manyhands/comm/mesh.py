"""A device mesh with named axes: its size along each axis, the grid position of each rank, the ranks of an axis.

Pure arithmetic; `training.worker.worker` connects the ranks of an axis. Consecutive ranks are neighbours on the tensor
axis first: it communicates most, so it stays on one host wherever it fits there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["AXES", "Formation", "Grid", "by_slots", "in_order", "left_over", "parts_without"]

AXES = ("pipeline", "data", "tensor")
"""From the axis with the least communication to the one with the most."""


class Grid(NamedTuple):
    """How many ranks there are along each axis."""

    pipeline: int = 1
    data: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        return self.pipeline * self.data * self.tensor

    def place(self, rank: int) -> Grid:
        """The grid position of a rank: its index on each axis."""
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return Grid(pipeline, data, tensor)


class Formation(NamedTuple):
    """A grid, and the position of each rank in it."""

    grid: Grid
    places: tuple[Grid, ...]

    def line(self, rank: int, *axes: str) -> list[int]:
        """The ranks whose positions differ from this rank's on `axes` only, itself included, in grid order."""
        mine = self.places[rank]
        fixed = [axis for axis in AXES if axis not in axes]
        ranks = [
            other
            for other, position in enumerate(self.places)
            if all(getattr(position, axis) == getattr(mine, axis) for axis in fixed)
        ]
        return sorted(ranks, key=lambda other: self.places[other])


def in_order(grid: Grid) -> Formation:
    """Ranks in the order of `Grid`."""
    return Formation(grid, tuple(grid.place(rank) for rank in range(grid.size)))


def by_slots(replica: Grid, slots: Sequence[int]) -> Formation | None:
    """The formation of an elastic run: a replica has consecutive slots; `slots` are in rank order.

    So a worker that takes over a slot takes over its grid position, and the other workers keep theirs. `replica` has a
    data axis of 1. None: a replica is incomplete.
    """
    replicas = sorted({slot // replica.size for slot in slots})
    if len(slots) != len(replicas) * replica.size:
        return None
    positions = (
        replica.place(slot % replica.size)._replace(data=replicas.index(slot // replica.size)) for slot in slots
    )
    return Formation(replica._replace(data=len(replicas)), tuple(positions))


def left_over(replica: Grid, slots: Sequence[int]) -> list[int]:
    """The slots of incomplete replicas."""
    filled = Counter(slot // replica.size for slot in slots)
    return [slot for slot in slots if filled[slot // replica.size] < replica.size]


def parts_without(replica: Grid, slots: Sequence[int]) -> list[Grid]:
    """The positions within a replica that no slot fills in any replica."""
    filled = {slot % replica.size for slot in slots}
    return [replica.place(number) for number in range(replica.size) if number not in filled]
