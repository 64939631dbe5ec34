"""Workers killed -9 at chosen points of a step, and between steps: the others continue, and the bits are the same."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.native import why_not
from tests.elastic.conftest import ENDLESS, Start, check_commits

pytestmark = [pytest.mark.slow, pytest.mark.faults]

SHARED = pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")
STEPS = 20


def faults(*places: tuple[int, int, str]) -> list[dict[str, Any]]:
    return [{"slot": slot, "step": step, "at": at} for slot, step, at in places]


@SHARED
@pytest.mark.parametrize(
    ("places", "clip"),
    [
        pytest.param(
            [(1, 8, "backward"), (0, 11, "before the sum"), (2, 14, "after the sum")], None, marks=pytest.mark.long
        ),
        ([(3, 8, "before its part"), (0, 11, "after its part"), (1, 14, "before the flip")], None),
        pytest.param(
            [(2, 8, "after the sum"), (1, 11, "after its part"), (0, 14, "forward")], 0.5, marks=pytest.mark.long
        ),
    ],
    ids=["around the sum", "around the update", "with clipping"],
)
def test_a_worker_killed_at_any_point_of_a_step_changes_nothing(
    elastic: Start, undisturbed: Any, places: list[tuple[int, int, str]], clip: float | None
) -> None:
    asked = {"steps": STEPS, "clip": clip}
    run = elastic({**asked, "faults": faults(*places)}, "-n", "4", "--elastic", "1:4")
    assert run.wait() == undisturbed(asked)
    check_commits(run)
    assert sum("died: SIGKILL" in event.why for event in run.generations()) == len(places)


@SHARED
@pytest.mark.long
def test_rows_of_embeddings_are_nobodys_loss(elastic: Start, undisturbed: Any) -> None:
    asked = {"steps": STEPS, "rows": True}
    places = faults((1, 8, "backward"), (0, 14, "after its part"), (2, 20, "before the flip"))
    run = elastic({**asked, "faults": places}, "-n", "4", "--elastic", "1:4")
    assert run.wait() == undisturbed(asked)
    check_commits(run)


@pytest.mark.long
def test_over_sockets_too(elastic: Start, undisturbed: Any) -> None:
    places = faults((1, 8, "backward"), (0, 11, "before Gloo's sum"), (2, 14, "after Gloo's sum"))
    run = elastic({"steps": STEPS, "faults": places}, "-n", "4", "--elastic", "1:4", "--plane", "gloo")
    assert run.wait() == undisturbed({"steps": STEPS})
    check_commits(run)


@SHARED
@pytest.mark.long
def test_batch_statistics_are_those_of_whole_steps_where_gradients_are_not_in_shared_memory(elastic: Start) -> None:
    """Workers wait for the killed one in the middle of a slice: what that slice made of the averages must not stay."""
    asked = {"steps": STEPS, "exact": False, "faults": faults((1, 8, "forward"))}
    run = elastic(asked, "-n", "2", "--elastic", "1:2", "--reducer", "bf16")
    assert run.wait()["batches"] == [8 * (STEPS + 20)]


def test_outside_of_steps_too(elastic: Start, undisturbed: Any) -> None:
    steps = 30  # of three epochs one ends on record
    places = faults((0, 0, "while saving"), (1, 10, "in evaluation"), (2, steps, "while saving"))
    run = elastic({"steps": steps, "faults": places}, "-n", "4", "--elastic", "1:4")
    assert run.wait() == undisturbed({"steps": steps})
    check_commits(run)


@pytest.mark.long
def test_two_at_once_and_a_third_while_the_others_regroup(elastic: Start, undisturbed: Any) -> None:
    places = faults((0, 12, "forward"), (1, 12, "forward"), (2, 12, "before the sum"))
    run = elastic({"steps": STEPS, "faults": places}, "-n", "4", "--elastic", "1:4")
    assert run.wait() == undisturbed({"steps": STEPS})
    check_commits(run)


@pytest.mark.long
@pytest.mark.parametrize("plane", ["auto", "gloo"])
def test_survivors_keep_their_processes_and_a_replacement_takes_the_slot(
    elastic: Start, undisturbed: Any, plane: str
) -> None:
    asked = {**ENDLESS, "faults": faults((1, 12, "backward")), "pause": 5}
    run = elastic(asked, "-n", "3", "--elastic", "1:3", "--plane", plane, "--hang", "300")
    first = run.until(lambda: len(found := run.members()) == 3 and found, "three workers")
    (run.folder / "continue").touch()
    run.until(lambda: run.step() > 14, "step 15")
    later = run.until(
        lambda: len(found := run.members()) == 3 and all(one.step for one in found) and found, "three again"
    )
    before, after = ({one.slot: one.pid for one in members} for members in (first, later))
    assert before.keys() == after.keys()
    assert [slot for slot in before if before[slot] != after[slot]] == [1]
    run.until(lambda: {commit["pid"] for commit in run.commits()} >= set(after.values()), "a commit by each")
    result = run.enough()
    assert result == undisturbed({"steps": result["reached"]})
    check_commits(run)
