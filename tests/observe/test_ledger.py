"""What a run's record proves: made-up histories with each kind of fault in them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from manyhands.events import Event, GenerationStarted, Resumed, RunEnded, StepDone
from manyhands.observe.run_audit import Rollback, audit, audit_run

SIZE, BATCH = 10, 4  # epochs of three steps: 4, 4 and 2 rows


def step(number: int, generation: str = "1.1", *, start: tuple[int, int] | None = None, rows: int = 0) -> StepDone:
    epoch, place = divmod(number - 1, 3)
    known = start or (epoch, BATCH * place)
    return StepDone(
        time_s=float(number), step=number, epoch=known[0], loss=1.0, rows=rows or min(BATCH, SIZE - known[1]),
        samples_per_s=1.0, phases={}, start=known, generation=generation,
    )  # fmt: skip


def generation(name: str) -> GenerationStarted:
    return GenerationStarted(generation=name, workers=2, hosts=1)


def steps(first: int, last: int, name: str = "1.1") -> list[Event]:
    return [step(number, name) for number in range(first, last + 1)]


def test_a_run_over_three_epochs_and_two_generations_is_proven() -> None:
    ledger = audit([generation("1.1"), *steps(1, 4), generation("1.2"), *steps(5, 9, "1.2")])
    assert (ledger.problems, ledger.last_step, ledger.recorded, ledger.generations) == ([], 9, 9, 2)
    assert (ledger.samples_lost, ledger.samples_repeated, ledger.steps_lost) == (0, 0, 0)


def test_files_with_the_same_steps_in_another_order_are_one_record() -> None:
    assert audit([*steps(5, 9, "1.10"), *steps(1, 4, "1.9"), *steps(3, 4, "1.9")]).problems == []


def test_a_step_that_two_generations_committed_is_found() -> None:
    ledger = audit([*steps(1, 4), *steps(4, 6, "1.2")])
    assert ledger.problems == ["step 4 was committed in generation 1.2, after step 4 had been in generation 1.1"]


def test_steps_that_were_taken_back_are_lost_but_not_wrong() -> None:
    ledger = audit([*steps(1, 5), Resumed(step=3, epoch=0, path="c"), *steps(4, 9, "1.2")])
    assert ledger.problems == []
    assert ledger.rollbacks == [Rollback(to_step=3, steps=2, generation="1.2")]
    assert (ledger.recorded, ledger.samples_repeated) == (9, 0)


def test_a_lone_process_that_is_resumed_has_the_same_generation_again() -> None:
    again = [msgspec.structs.replace(step(number), time_s=10.0 + number) for number in (4, 5, 6)]
    ledger = audit([*steps(1, 5), Resumed(step=3, epoch=0, path="c"), *again])
    assert (ledger.problems, ledger.steps_lost, ledger.recorded) == ([], 2, 6)


def test_a_generation_that_is_not_larger_than_the_one_before_is_found() -> None:
    assert audit([generation("1.2"), generation("1.1")]).problems == ["generations are not in ascending order: 1.2 1.1"]
    assert "never announced" in audit([generation("1.1"), step(1, "1.2")]).problems[0]


def test_samples_that_were_left_out_or_taken_again_are_counted() -> None:
    left_out = audit([step(1), step(2, start=(0, 6))])
    assert (left_out.samples_lost, left_out.samples_repeated) == (2, 0)
    again = audit([step(1), step(2, start=(0, 1), rows=4)])
    assert (again.samples_lost, again.samples_repeated) == (0, 3)
    short = audit([*steps(1, 2), step(3, start=(1, 0)), step(4, start=(1, 4)), step(5, start=(1, 8))])
    assert short.samples_lost == 2  # the first epoch ended at row 8, the second one at 10


@pytest.mark.parametrize("missing", [(2,), (3,), (2, 3), (3, 4), (4, 5, 6)])
def test_steps_that_a_killed_chief_took_along_are_accounted_for_by_their_neighbours(missing: tuple[int, ...]) -> None:
    ledger = audit([event for event in [*steps(1, 9)] if isinstance(event, StepDone) and event.step not in missing])
    assert (ledger.problems, ledger.unrecorded) == ([], len(missing))


@pytest.mark.parametrize("recorded", [(1, 2, 5, 8), (5, 7, 8), (4, 5)])
def test_so_are_those_at_the_ends_of_epochs_of_which_none_is_on_record(recorded: tuple[int, ...]) -> None:
    ledger = audit([event for event in steps(1, 9) if isinstance(event, StepDone) and event.step in recorded])
    assert (ledger.problems, ledger.unrecorded) == ([], recorded[-1] - len(recorded))


def test_a_gap_whose_rows_do_not_add_up_is_found() -> None:
    assert "are not recorded" in audit([step(1), step(3, start=(0, 4))]).problems[0]
    assert "no record explains the steps before it" in audit([step(3, start=(0, 4))]).problems[0]


def updates(*batches: int) -> list[Event]:
    """Asynchronous: the n-th update took the rows of the n-th of these."""
    taken = [step(batch) for batch in batches]
    return [
        msgspec.structs.replace(one, step=number, batch=one.step, time_s=float(number))
        for number, one in enumerate(taken, start=1)
    ]


def test_asynchronous_updates_may_take_batches_in_any_order_but_each_of_them_once() -> None:
    ledger = audit(updates(2, 3, 1, 6, 5, 4))
    assert (ledger.problems, ledger.last_step, ledger.recorded) == ([], 6, 6)
    again = audit(updates(2, 3, 2, 5, 4, 6))
    assert again.samples_repeated == 4 and "step 2 used 4 samples of this epoch again" in again.problems


def test_an_update_that_a_killed_chief_took_along_had_the_batch_that_is_missing() -> None:
    ledger = audit([event for event in updates(2, 3, 1, 6, 5, 4) if isinstance(event, StepDone) and event.step != 4])
    assert (ledger.problems, ledger.unrecorded, ledger.recorded) == ([], 1, 5)


def test_a_batch_that_is_still_under_way_at_the_end_is_lost_if_the_run_ended_well() -> None:
    amid = updates(1, 3, 2, 5)
    assert audit(amid).problems == [] == audit([*amid, RunEnded(exit_code=1, step=4, reason="")]).problems
    ledger = audit([*amid, RunEnded(exit_code=0, step=4, reason="")])
    assert ledger.problems == ["4 updates took batch 5, so 1 of the batches before it were skipped"]
    assert ledger.samples_lost == 4


def test_a_run_directory_without_events_proves_nothing_and_contradicts_nothing(tmp_path: Path) -> None:
    assert audit_run(tmp_path).last_step == 0


def test_unrecorded_steps_of_batches_of_any_size_are_believed_where_they_fit() -> None:
    sizes = (6, 1, 9, 4)  # an epoch of 20 rows
    every = [
        step(number, start=(0 if number < 5 else 1, sum(sizes[: (number - 1) % 4])), rows=sizes[(number - 1) % 4])
        for number in range(1, 9)
    ]
    assert audit(every).problems == []
    without = [one for one in every if one.step not in (3, 4)]
    assert (audit(without).problems, audit(without).unrecorded) == ([], 2)
    too_near = [*every[:6], step(9, start=(1, 8), rows=2)]  # one row is left for two steps
    assert "steps 7 to 8 are not recorded" in audit(too_near).problems[0]
