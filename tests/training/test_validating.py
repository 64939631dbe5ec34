"""When rows are added to the history, and what stops a training early: pure."""

from __future__ import annotations

import math
from typing import Any

import pytest

import manyhands as mh
from manyhands.checkpoint.retention import parse_best
from manyhands.errors import SpecError
from manyhands.events import Validated
from manyhands.observe.event_text import line_of
from manyhands.training.step.validation_schedule import (
    Moment,
    Validations,
    check_train_metrics,
    check_validations,
    only_at_the_end,
)


def rows_of(validations: Validations, steps: int, began_at: int = 0, **flags: Any) -> list[int]:
    """The steps that get a row; `flags` name steps, `epoch` the steps of one, `held` those that must wait."""
    found: list[int] = []
    for step in range(began_at + 1, began_at + steps + 1):
        if step in flags.get("held", ()):
            continue
        at = Moment(
            step,
            began_at,
            found[-1] if found else began_at,
            ends_epoch=step % flags.get("epoch", 1000) == 0,
            ends_fit=step == began_at + steps,
            requested=step in flags.get("requested", ()),
        )
        if validations.is_due(at):
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("validations", "flags", "expected"),
    [
        (Validations(), {"steps": 8, "epoch": 4}, [4, 8]),
        (Validations(by_steps=True), {"steps": 10, "epoch": 4}, [4, 8, 10]),
        (Validations(by_steps=True), {"steps": 3, "epoch": 4}, [3]),
        (Validations(), {"steps": 10, "epoch": 4}, [4, 8]),
        (Validations(every_steps=3), {"steps": 10, "epoch": 4}, [3, 6, 9, 10]),
        (Validations(every_steps=3), {"steps": 9, "began_at": 5}, [8, 11, 14]),
        (Validations(every_steps=30), {"steps": 10, "epoch": 4}, [10]),
        (Validations(every_s=1.0), {"steps": 10, "requested": [2, 7]}, [2, 7, 10]),
        (Validations(every_steps=4, every_s=1.0), {"steps": 9, "requested": [5]}, [4, 5, 8, 9]),
        (Validations(every_steps=3), {"steps": 10, "held": [3, 4, 9]}, [5, 6, 10]),
    ],
)
def test_rows_come_at_epochs_or_by_steps_and_clock_and_where_the_training_ends(validations, flags, expected) -> None:
    assert rows_of(validations, **flags) == expected


def test_the_next_validation_is_known_ahead_and_counts_from_the_start_of_the_call() -> None:
    by_steps = Validations(every_steps=10)
    assert [by_steps.next_step(step, 5) for step in (5, 6, 14, 15)] == [15, 15, 15, 25]
    assert Validations(every_s=1.0).next_step(5, 5) is None


@pytest.mark.parametrize(
    ("asked", "validates", "said"),
    [
        ({"validate_every": 10}, False, "nothing to validate on"),
        ({"validate_every_s": 5.0}, False, "nothing to validate on"),
        ({"validate_every": 0}, True, "validate_every is 0"),
        ({"validate_every": 2.5}, True, "validate_every is 2.5"),
        ({"validate_every": True}, True, "validate_every is True"),
        ({"validate_every_s": 0}, True, "validate_every_s is 0"),
        ({"validate_every_s": math.nan}, True, "validate_every_s is nan"),
    ],
)
def test_a_validation_that_cannot_be_is_refused_with_what_to_write(asked, validates, said) -> None:
    with pytest.raises(SpecError, match=said) as refused:
        check_validations(asked, validates=validates)
    assert refused.value.fix


def test_metrics_of_training_data_need_rows_and_metrics() -> None:
    check_train_metrics(None, {})
    check_train_metrics(10, {"accuracy": len})
    with pytest.raises(SpecError, match="train_metrics is 0"):
        check_train_metrics(0, {"accuracy": len})
    with pytest.raises(SpecError, match="no metrics"):
        check_train_metrics(10, {})


def test_more_steps_between_validations_than_there_are_is_said() -> None:
    assert "once, at its end" in only_at_the_end(Validations(every_steps=50), 20)
    assert only_at_the_end(Validations(every_steps=20), 20) == ""
    assert only_at_the_end(Validations(every_steps=50), None) == ""
    assert only_at_the_end(Validations(every_steps=50, every_s=1.0), 20) == ""


def test_a_result_that_is_no_number_from_the_start_stops_the_training_and_is_named() -> None:
    early = mh.EarlyStop(patience=2)
    rows = [{"step": step, "val_loss": math.nan} for step in (10, 20)]
    assert [early.verdict([row["val_loss"] for row in rows[:n]]) for n in (1, 2)] == [False, True]
    assert early.reason("val_loss", rows) == (
        "Stopped early at step 20: val_loss has not been a number from the start, so the training has diverged."
    )
    assert "since step 5," in early.reason("val_loss", [{"step": 5, "val_loss": 1.0}, *rows])


def test_the_end_by_early_stopping_names_the_best_and_its_step() -> None:
    rows = [{"step": s, "val_accuracy": v} for s, v in ((10, 0.5), (20, 0.75), (30, 0.7), (40, 0.75))]
    reason = mh.EarlyStop(metric="accuracy", patience=2).reason("val_accuracy", rows)
    assert reason.startswith("Stopped early at step 40: val_accuracy has not improved since step 20 (0.75)")


def test_the_better_of_two_results_depends_on_what_is_kept() -> None:
    smallest, largest = parse_best("loss"), parse_best("accuracy")
    assert smallest is not None and largest is not None
    assert smallest.is_better(0.1, None) and smallest.is_better(0.1, 0.2) and not smallest.is_better(0.2, 0.2)
    assert largest.is_better(0.3, 0.2) and not largest.is_better(0.1, 0.2)


def test_a_row_inside_an_epoch_has_a_line() -> None:
    row = {"epoch": 0.0, "step": 6.0, "loss": 0.5, "val_loss": 0.25}
    assert line_of(Validated(epoch=0, step=6, results=row)) == "validated at step 6  loss 0.5  val_loss 0.25"
    del row["val_loss"]
    assert line_of(Validated(epoch=0, step=6, results=row)) == "trained to step 6  loss 0.5"
