from __future__ import annotations

from itertools import product

import pytest

from manyhands.comm.mesh import AXES, Grid, by_slots, in_order, left_over, parts_without


@pytest.mark.parametrize("grid", [Grid(*degrees) for degrees in product((1, 2, 3), repeat=3)])
def test_every_rank_has_its_own_grid_position(grid: Grid) -> None:
    places = in_order(grid).places
    assert list(places) == sorted(places) and len(set(places)) == grid.size


def test_neighbours_are_on_the_axis_that_communicates_most() -> None:
    formation = in_order(Grid(pipeline=2, data=2, tensor=2))
    assert formation.line(5, "tensor") == [4, 5]
    assert formation.line(5, "data") == [5, 7]
    assert formation.line(5, "pipeline") == [1, 5]
    assert formation.line(5, "pipeline", "tensor") == [0, 1, 4, 5]
    assert formation.line(5, *AXES) == list(range(8))


def test_a_worker_that_takes_a_slot_takes_its_grid_position() -> None:
    replica = Grid(pipeline=2, tensor=2)
    at_first = by_slots(replica, range(8))
    after = by_slots(replica, [0, 2, 3, 4, 5, 6, 7, 1])  # the one in slot 1 was lost, and its successor comes last
    assert at_first is not None and after is not None
    assert at_first.grid == after.grid == Grid(pipeline=2, data=2, tensor=2)
    assert after.places[7] == at_first.places[1] == Grid(0, 0, 1)
    assert after.places[1] == at_first.places[2]
    assert after.line(7, "tensor") == [0, 7] and after.line(7, "data") == [7, 4]


def test_replicas_may_be_gone_whole_but_not_in_part() -> None:
    replica = Grid(pipeline=2)
    left = by_slots(replica, [2, 3])
    assert left is not None and left.grid == Grid(pipeline=2, data=1)
    assert left.places == (Grid(0, 0, 0), Grid(1, 0, 0))
    assert by_slots(replica, [0, 2, 3]) is None
    assert by_slots(replica, [0, 3]) is None


def test_workers_that_form_no_whole_replica_are_left_over() -> None:
    assert left_over(Grid(pipeline=2), [0, 1, 2]) == [2]
    assert left_over(Grid(pipeline=2), [0, 1, 2, 3]) == []


def test_a_part_is_lost_when_no_replica_has_it() -> None:
    replica = Grid(pipeline=2)
    assert parts_without(replica, [0, 2, 3]) == []
    assert parts_without(replica, [0, 3]) == []
    assert parts_without(replica, [0, 2]) == [Grid(1, 0, 0)]
