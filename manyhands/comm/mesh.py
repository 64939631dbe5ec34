"""Ranks in a grid with named axes: how many there are along each, where a rank is, and whom it meets on an axis.

Pure arithmetic; who connects the ranks of a line is `runtime.worker`'s business. Neighbours in rank are neighbours on
the tensor axis first: it talks most, so it stays on one host wherever it fits there.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["AXES", "Grid"]

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

    def rank(self, place: Grid) -> int:
        return (place.pipeline * self.data + place.data) * self.tensor + place.tensor

    def line(self, rank: int, *axes: str) -> list[int]:
        """The ranks that differ from this one in their places on `axes` alone; itself included, in their order."""
        mine = self.place(rank)
        fixed = [axis for axis in AXES if axis not in axes]
        return [
            other
            for other in range(self.size)
            if all(getattr(self.place(other), axis) == getattr(mine, axis) for axis in fixed)
        ]
