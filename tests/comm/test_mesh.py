from __future__ import annotations

from itertools import product

import pytest

from manyhands.comm.mesh import AXES, Grid


@pytest.mark.parametrize("grid", [Grid(*degrees) for degrees in product((1, 2, 3), repeat=3)])
def test_every_rank_has_a_place_of_its_own(grid: Grid) -> None:
    assert [grid.rank(grid.place(rank)) for rank in range(grid.size)] == list(range(grid.size))


def test_neighbours_meet_on_the_axis_that_talks_most() -> None:
    grid = Grid(pipeline=2, data=2, tensor=2)
    assert grid.line(5, "tensor") == [4, 5]
    assert grid.line(5, "data") == [5, 7]
    assert grid.line(5, "pipeline") == [1, 5]
    assert grid.line(5, "pipeline", "tensor") == [0, 1, 4, 5]
    assert grid.line(5, *AXES) == list(range(8))
