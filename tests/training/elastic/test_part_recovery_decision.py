"""Which worker sends its part of a divided model to which, decided without processes."""

from __future__ import annotations

import pytest

from manyhands.comm.mesh import Formation, Grid, by_slots
from manyhands.training.elastic.part_recovery_decision import hand_over, words
from manyhands.training.elastic.recovery_decision import Doing, WorkerProgress

REPLICA = Grid(pipeline=2)


def formed(*slots: int) -> Formation:
    found = by_slots(REPLICA, slots)
    assert found is not None
    return found


def at(step: int | None, doing: Doing = "steps") -> WorkerProgress:
    return WorkerProgress(call=1, step=step or 0, operation=0, doing=doing, done=False, has_state=step is not None)


def test_a_newcomer_gets_its_part_from_the_other_replica() -> None:
    found = hand_over([at(6), at(6), at(6), at(None)], formed(0, 2, 3, 1))
    assert found is not None and found.step == 6
    assert found.takes == (False, False, False, True)
    assert found.givers[3] == 2  # slot 3, whose place in its replica is that of slot 1


def test_a_worker_that_missed_the_end_of_a_step_gets_it_from_one_with_the_same_part() -> None:
    found = hand_over([at(7), at(6), at(6), at(7)], formed(0, 1, 2, 3))
    assert found is not None and found.step == 7
    assert found.takes == (False, True, True, False)
    assert (found.givers[1], found.givers[2]) == (3, 0)


def test_a_step_that_some_part_of_the_model_has_not_taken_is_taken_back() -> None:
    found = hand_over([at(7), at(6), at(6), at(6)], formed(0, 1, 2, 3))
    assert found is not None and found.step == 6
    assert found.takes == (True, False, False, False) and found.givers[0] == 2


@pytest.mark.parametrize("doing", ["an evaluation", "something else"])
def test_a_step_is_not_taken_back_by_one_that_does_what_follows_it(doing: Doing) -> None:
    """It would do that with the state of the step before, while the others take the step."""
    assert hand_over([at(7, doing), at(6), at(6), at(6)], formed(0, 1, 2, 3)) is None
    behind = hand_over([at(7, doing), at(7, doing), at(6), at(6)], formed(0, 1, 2, 3))
    assert behind is not None and behind.step == 7, "the workers behind get its state"


@pytest.mark.parametrize(
    "members",
    [
        pytest.param([at(6), at(None), at(6), at(None)], id="both that had a part are gone"),
        pytest.param(
            [at(7), at(6), at(7), at(None)], id="one part has the step, the other has not, and none goes back"
        ),
        pytest.param([at(None)] * 4, id="no worker has anything"),
    ],
)
def test_without_a_step_that_is_known_whole_there_is_the_checkpoint(members: list[WorkerProgress]) -> None:
    assert hand_over(members, formed(0, 1, 2, 3)) is None


def test_parts_are_described_in_words() -> None:
    assert words(Grid(1, 0, 0), Grid(pipeline=2)) == "stage 2 of 2"
    assert words(Grid(0, 0, 1), Grid(tensor=2)) == "part 2 of 2 of the layers"
    assert words(Grid(1, 0, 0), Grid(pipeline=2, tensor=2)) == "stage 2 of 2, part 1 of 2 of the layers"
