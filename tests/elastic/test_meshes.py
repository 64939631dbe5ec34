"""Elastic meshes whose workers die, and are replaced, at points where the others are not in a step.

Always the weights, and the results of every call, of one undisturbed process.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.elastic.conftest import Run, Start, check_commits

pytestmark = [pytest.mark.slow, pytest.mark.faults]

MESHES = {"stages": {"data": 2, "pipeline": 2}, "tensors": {"data": 2, "tensor": 2}}
FOUR = ("-n", "4", "--elastic", "2:4", "--hang", "100")  # some wait for the test


def assert_alike(result: dict[str, Any], alone: dict[str, Any]) -> None:
    assert result["reached"] == alone["reached"]
    for mine, right in zip(result["calls"], alone["calls"], strict=True):
        for one, other in zip(*([each] if isinstance(each, dict) else each for each in (mine, right)), strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
    for name, values in alone["weights"].items():
        assert result["weights"][name] == pytest.approx(values, rel=1e-4, abs=1e-5), name


def replica_lost(step: int, at: str = "before") -> list[dict[str, Any]]:
    """The others train without it until both of its workers are replaced."""
    return [{"slot": slot, "step": step, "at": at} for slot in (2, 3)]


def end_with_others(run: Run) -> dict[str, Any]:
    """They continue where they paused, once a replica has replaced the one that was lost."""
    run.until(lambda: "2 joined" in run.output(), "others", 150.0)
    (run.folder / "continue").touch()
    result = run.wait(150.0)
    check_commits(run)
    assert "restarting" not in run.output()
    return result


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("pause", [40, 60])
def test_a_replica_that_is_admitted_after_the_last_step_of_a_call_ends_it_with_the_others(
    elastic: Start, undisturbed: Any, mesh: str, pause: int
) -> None:
    """With `pause` at 40, after an evaluation too."""
    asked = {"steps": 40, "mesh": MESHES[mesh]}
    run = elastic({**asked, "faults": replica_lost(pause - 5), "pause": pause}, *FOUR)
    assert_alike(end_with_others(run), undisturbed(asked))


@pytest.mark.long
def test_a_step_that_one_who_evaluates_would_have_to_take_back_is_not_known_whole(
    elastic: Start, undisturbed: Any
) -> None:
    """A replica has ended it, and loses a worker; the other one, which has not, learns of that before its end."""
    asked = {"steps": 20, "mesh": MESHES["stages"], "save_every": 4}
    faults = [
        {"slot": 1, "step": 10, "at": "in evaluation"},
        {"slot": 2, "step": 10, "at": "before the replica agrees", "how": "wait"},
    ]
    run = elastic({**asked, "faults": faults}, *FOUR)
    run.until(lambda: "lost rank 1" in run.output(), "the loss of one that evaluates", 150.0)
    (run.folder / "continue").touch()
    assert_alike(run.wait(150.0), undisturbed(asked))
    assert "restarting from step 8" in run.output()


@pytest.mark.long
def test_a_newcomer_that_loses_others_while_it_takes_its_part_is_started_again(
    elastic: Start, undisturbed: Any
) -> None:
    """It has given up what is theirs of the model by then, and could not divide it once more."""
    asked = {"steps": 40, "tied": True, "mesh": {**MESHES["stages"], "cuts": ["second"]}}
    dies = {"slot": 3, "step": 0, "at": "while cutting", "how": "die once", "newcomer": True}
    run = elastic({**asked, "faults": [*replica_lost(10), dies], "pause": 20}, *FOUR)
    assert_alike(end_with_others(run), undisturbed(asked))
    assert (run.folder / "died").exists()
