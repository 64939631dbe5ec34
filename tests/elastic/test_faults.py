"""Hangs, a lost coordinator, and workers that come and go, in real trainings: always the same bits in the end."""

from __future__ import annotations

import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from manyhands.control.session.run_client import query, request_scale
from tests.elastic.conftest import ENDLESS, Run, Start, check_commits

pytestmark = [pytest.mark.slow, pytest.mark.faults]

OWN_LOOP, CALLING = (Path(__file__).with_name(name) for name in ("own_loop.py", "calling.py"))


# Who waits until a newcomer has come is not taken for hung: on a busy machine one takes its time to start.
PATIENT = ("--hang", "300")


def longest_gap(run: Run, after_step: int) -> float:
    """The longest time between commits of consecutive steps, by any worker, from `after_step` on."""
    first: dict[int, float] = {}
    for commit in run.commits():
        first[commit["step"]] = min(commit["at"], first.get(commit["step"], commit["at"]))
    steps = [step for step in sorted(first) if step >= after_step]
    return max(first[b] - first[a] for a, b in pairwise(steps))


@pytest.mark.long
def test_workers_that_stop_or_hold_their_interpreter_are_replaced_and_named(elastic: Start, undisturbed: Any) -> None:
    places = [
        {"slot": 1, "step": 10, "at": "forward", "how": "stop"},
        {"slot": 0, "step": 18, "at": "forward", "how": "hold"},
    ]
    run = elastic({"steps": 40, "faults": places}, "-n", "3", "--elastic", "1:3")
    assert run.wait() == undisturbed({"steps": 40})
    check_commits(run)
    assert "rank 1" in run.output() and "stopped" in run.output()
    assert "hold_the_interpreter" in run.output(), "the place in the code"


@pytest.mark.long
def test_a_worker_that_is_busy_without_progress_is_replaced(elastic: Start, undisturbed: Any) -> None:
    places = [{"slot": 2, "step": 5, "at": "backward", "how": "spin"}]  # so soon that few reports were sent
    run = elastic({"steps": 40, "faults": places}, "-n", "3", "--elastic", "1:3", "--hang", "1.5")
    assert run.wait() == undisturbed({"steps": 40})
    check_commits(run)
    assert "spin" in run.output()


@pytest.mark.long
@pytest.mark.parametrize("pause", [40, 60])
def test_a_worker_that_is_admitted_after_the_last_step_of_a_call_ends_it_with_the_others(
    elastic: Start, undisturbed: Any, pause: int
) -> None:
    """With `pause` at 40, after an evaluation too."""
    run = elastic(
        {"steps": 40, "faults": [{"slot": 2, "step": pause - 5, "at": "forward"}], "pause": pause},
        *("-n", "3", "--elastic", "1:3", *PATIENT),
    )
    run.until(lambda: "1 joined" in run.output(), "another one")
    (run.folder / "continue").touch()
    assert run.wait() == undisturbed({"steps": 40})
    check_commits(run)
    assert "an exchange between workers failed" not in run.output()


@pytest.mark.parametrize("at", [pytest.param("in evaluation", marks=pytest.mark.long), "while saving"])
def test_a_worker_that_is_lost_outside_of_steps_while_another_waits_to_be_admitted(
    elastic: Start, undisturbed: Any, at: str
) -> None:
    places = [
        {"slot": 2, "step": 40, "at": "forward"},
        {"slot": 1, "step": 40, "at": at, "how": "die late"},
        {"slot": 0, "step": 40, "at": at, "how": "wait"},
    ]
    run = elastic({"steps": 40, "faults": places}, "-n", "3", "--elastic", "1:3", *PATIENT)
    run.until(lambda: "1 joined" in run.output(), "another one")
    (run.folder / "continue").touch()
    assert run.wait() == undisturbed({"steps": 40})
    check_commits(run)
    assert "an exchange between workers failed" not in run.output()


BY_STEPS = {"steps": 24, "validate_every": 7, "train_metrics": 50}


@pytest.mark.long
def test_a_worker_that_comes_while_the_others_validate_inside_an_epoch_has_the_same_history(
    elastic: Start, undisturbed: Any
) -> None:
    places = [
        {"slot": 2, "step": 14, "at": "forward"},
        {"slot": 1, "step": 14, "at": "in evaluation", "how": "die late"},
        {"slot": 0, "step": 14, "at": "in evaluation", "how": "wait"},
    ]
    run = elastic({**BY_STEPS, "faults": places}, "-n", "3", "--elastic", "1:3", *PATIENT)
    run.until(lambda: "1 joined" in run.output(), "another one")
    (run.folder / "continue").touch()
    result = run.wait()
    assert result == undisturbed(BY_STEPS)
    assert [row["step"] for row in result["calls"][0]] == [7, 14, 21, 24]
    check_commits(run)


@pytest.mark.long
def test_the_clock_of_a_chief_that_is_killed_is_anothers_and_all_validate_after_the_same_steps(
    elastic: Start, undisturbed: Any
) -> None:
    """A row for each step: every worker would hang, or differ, if one of them validated elsewhere."""
    asked = {"steps": 24, "validate_every_s": 1e-9}
    places = [{"slot": 0, "step": 9, "at": "in evaluation"}, {"slot": 1, "step": 15, "at": "backward"}]
    run = elastic({**asked, "faults": places}, "-n", "3", "--elastic", "1:3")
    result = run.wait()
    alone = undisturbed({"steps": 24, "validate_every": 1})
    assert result["digest"] == alone["digest"]
    known = {row["step"]: row for row in alone["calls"][0]}
    found = {row["step"]: row for row in result["calls"][0]}
    assert len(found) >= 20 and 24 in found
    assert {step: row["val_loss"] for step, row in found.items()} == {s: known[s]["val_loss"] for s in found}
    check_commits(run)


@pytest.mark.parametrize("step", [10, pytest.param(40, marks=pytest.mark.long)])
def test_an_operation_whose_end_only_one_worker_missed_is_not_repeated(
    elastic: Start, undisturbed: Any, step: int
) -> None:
    """With the others in the next step, and in the next thing that all do together."""
    run = elastic(
        {"steps": 40, "faults": [{"slot": 1, "step": step, "at": "after a barrier", "how": "lose"}]},
        *("-n", "3", "--elastic", "1:3"),
    )
    assert run.wait() == undisturbed({"steps": 40})
    check_commits(run)
    assert run.output().count("an exchange between workers failed") == 1


def test_steps_continue_without_the_coordinator_which_finds_out_who_was_killed_when_it_is_back(
    elastic: Start, undisturbed: Any
) -> None:
    run = elastic(ENDLESS, "-n", "3", "--elastic", "1:3")
    run.until(lambda: run.step() > 10, "step 10")
    first = query(run.directory).coordinator_pid
    os.kill(first, signal.SIGKILL)
    reached = run.step()
    second = run.until(lambda: (now := query(run.directory).coordinator_pid) not in (0, first) and now, "another one")
    run.until(lambda: run.step() > reached + 20, "twenty steps more")
    assert len(run.generations()) == 1, "no generation without a reason"
    assert longest_gap(run, 10) < 10.0
    victim = run.until(run.members, "members")[1].pid
    os.kill(second, signal.SIGKILL)
    os.kill(victim, signal.SIGKILL)
    reached = run.step()
    run.until(lambda: run.step() > reached + 5, "five steps more")
    result = run.enough()
    assert result == undisturbed({"steps": result["reached"]})
    check_commits(run)
    assert "died: SIGKILL" in run.generations()[1].why


def test_a_run_scaled_from_2_to_1_to_3_ends_where_one_worker_ends(elastic: Start, undisturbed: Any) -> None:
    run = elastic(ENDLESS, "-n", "2", "--elastic", "1:3")
    run.until(lambda: run.step() > 10, "step 10")
    for wanted in (1, 3):
        request_scale(run.directory, wanted)
        run.until(lambda wanted=wanted: len(run.members()) == wanted, f"{wanted} workers")
        reached = run.step()
        run.until(lambda reached=reached: run.step() > reached + 5, "five steps more")
    result = run.enough()
    assert result == undisturbed({"steps": result["reached"]})
    check_commits(run)
    assert not [event for event in run.generations() if "died" in event.why]


@pytest.mark.long
def test_with_too_few_workers_the_run_waits_between_two_steps(elastic: Start, undisturbed: Any) -> None:
    places = [{"slot": 1, "step": 10, "at": "backward"}]
    # A forked replacement can be there before the first one has noticed that it is alone.
    run = elastic({"steps": 20, "faults": places}, "-n", "2", "--elastic", "2:2", "--start", "spawn")
    assert run.wait() == undisturbed({"steps": 20})
    check_commits(run)
    counts: dict[int, int] = {}
    for commit in run.commits():
        counts[commit["step"]] = counts.get(commit["step"], 0) + 1
    alone = [step for step, count in counts.items() if count == 1]
    assert alone in ([10], [11], [10, 11]), "the step under way, and the one after it, whose request is to wait"
    assert "waiting: 1 of at least 2 workers are there" in run.output()


@pytest.mark.long
def test_a_newcomer_killed_while_it_joins_is_no_loss_to_the_others(elastic: Start, undisturbed: Any) -> None:
    run = elastic(ENDLESS, "-n", "2", "--elastic", "1:3")
    run.until(lambda: run.step() > 10, "step 10")
    request_scale(run.directory, 3)

    def newcomer() -> list[Any]:
        return [one for one in query(run.directory).members if one.slot == 2 and psutil.pid_exists(one.pid)]

    [first] = run.until(newcomer, "a third worker")
    os.kill(first.pid, signal.SIGKILL)
    run.until(lambda: len(found := run.members()) == 3 and all(one.step for one in found), "three workers")
    result = run.enough()
    assert result == undisturbed({"steps": result["reached"]})
    check_commits(run)


@pytest.mark.long
def test_a_loop_of_ones_own_asks_those_who_took_the_step_and_newcomers_after_the_next(elastic: Start) -> None:
    run = elastic(
        {"steps": 40, "faults": [{"slot": 2, "step": 30, "at": "forward"}], "pause": 36},
        *("-n", "3", "--elastic", "1:3", *PATIENT),
        script=OWN_LOOP,
    )
    run.until(lambda: "1 joined" in run.output(), "another one")
    (run.folder / "continue").touch()
    alone = elastic({"steps": 40}, "-n", "1", script=OWN_LOOP)
    assert run.wait() == alone.wait()
    assert "an exchange between workers failed" not in run.output()


@pytest.mark.long
def test_a_worker_that_gets_ready_later_than_the_others_begins_in_the_call_that_they_begin_in(
    elastic: Start, undisturbed: Any
) -> None:
    """In the first attempt in the first call, in the second attempt in the third."""
    places = [{"slot": 1, "step": 0, "at": "set up", "how": "lose"}]
    run = elastic({"steps": 10, "slow_s": 0.05, "save_every": 2, "faults": places}, "-n", "3", "--elastic", "1:3")
    run.until(lambda: run.step() > 15, "the second call of fit")
    for member in run.members():
        os.kill(member.pid, signal.SIGKILL)
    result, expected = run.wait(), undisturbed({"steps": 10})
    assert (result["digest"], result["calls"]) == (expected["digest"], expected["calls"])
    assert "attempt 2" in run.output()


@pytest.mark.long
def test_a_worker_that_is_stopped_before_its_first_step_is_replaced(elastic: Start, undisturbed: Any) -> None:
    places = [{"slot": 1, "step": 0, "at": "set up", "how": "stop"}]
    run = elastic({"steps": 10, "faults": places}, "-n", "3", "--elastic", "1:3")
    assert run.wait(110.0) == undisturbed({"steps": 10})
    assert "the process is stopped" in run.output()


@pytest.mark.long
def test_a_worker_without_a_slice_joins_the_means_of_the_others(elastic: Start) -> None:
    places = [{"slot": 1, "step": 12, "at": "forward"}]
    run = elastic({"steps": 25, "slices": 2, "faults": places}, "-n", "4", "--elastic", "1:4", script=OWN_LOOP)
    alone = elastic({"steps": 25, "slices": 2}, "-n", "1", script=OWN_LOOP)
    assert run.wait() == alone.wait()
    assert "different collectives" not in run.output() and "an exchange between workers failed" not in run.output()


@pytest.mark.long
def test_workers_lost_between_two_calls_are_replaced_in_the_next(elastic: Start) -> None:
    places = [
        {"slot": 0, "step": 10, "at": "before predictions are kept"},
        {"slot": 1, "step": 10, "at": "while loading"},
    ]
    run = elastic({"steps": 20, "faults": places, "pause": 20}, "-n", "3", "--elastic", "1:3", script=CALLING)
    run.until(lambda: " joined" in run.output(), "another one")
    (run.folder / "continue").touch()
    alone = elastic({"steps": 20}, "-n", "1", script=CALLING)
    assert run.wait() == alone.wait()
    assert "attempt 2" not in run.output() and "an exchange between workers failed" not in run.output()


@pytest.mark.long
def test_a_worker_that_cannot_know_earlier_results_of_others_says_so_and_the_others_continue(elastic: Start) -> None:
    places = [{"slot": 2, "step": 8, "at": "forward"}]
    run = elastic(
        {"steps": 20, "before": True, "faults": places, "pause": 12},
        *("-n", "3", "--elastic", "1:3"),
        script=OWN_LOOP,
    )
    run.until(lambda: "UsageError: This worker joined a running run" in run.output(), "word of the one that came")
    (run.folder / "continue").touch()
    alone = elastic({"steps": 20, "before": True}, "-n", "1", script=OWN_LOOP)
    assert run.wait() == alone.wait()
