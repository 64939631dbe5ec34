"""Other orders of data, ready batches and hooks while workers are killed -9: the same bits, and each call once."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tests.elastic.conftest import Run, Start, check_commits
from tests.elastic.test_kills import faults

pytestmark = [pytest.mark.long, pytest.mark.faults]

STEPS = 30
# The second one is the chief. With fewer than two workers the run waits, so one is there when the last of them dies.
KILLS = [(1, 8, "backward"), (0, 14, "forward"), (2, 20, "in evaluation")]

# The first `fit` ends with this checkpoint, and the second one begins with another of the same step.
BETWEEN_FITS = ("checkpoint", str(STEPS))


def diary_of(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "diary.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", ["by weight", "by length", "ready batches", "loader of batches"])
def test_killed_workers_change_neither_order_nor_batches_nor_calls_of_hooks(
    elastic: Start, undisturbed: Any, kind: str
) -> None:
    asked = {"steps": STEPS, "kind": kind, "save_every": 4}
    run = elastic({**asked, "diary": "diary.jsonl", "faults": faults(*KILLS)}, "-n", "3", "--elastic", "2:3")
    assert run.wait() == undisturbed(asked)
    check_commits(run)
    assert sum("died: SIGKILL" in event.why for event in run.generations()) == len(KILLS)
    check_hooks(diary_of(run))


def check_hooks(lines: list[dict[str, Any]]) -> None:
    by_everyone, by_chiefs = ([one for one in lines if one["chief_only"] is only] for only in (False, True))
    for calls in (
        Counter((one["pid"], *map(str, one["of"])) for one in by_everyone),
        Counter(tuple(map(str, one["of"])) for one in by_chiefs),
    ):
        twice = [call for call, times in calls.items() if times > 1]
        assert not [call for call in twice if call[-2:] != BETWEEN_FITS], "called twice"
    of_chiefs = [one["of"] for one in by_chiefs]
    validations = [of for of in of_chiefs if of[0].endswith("validation")]
    assert [of[:2] for of in validations] == [
        [moment, step] for step in (10, 20, 30) for moment in ("before validation", "after validation")
    ]
    results = {json.dumps(one["of"]) for one in by_everyone if one["of"][0] == "after validation"}
    assert results == {json.dumps(of) for of in validations if of[0] == "after validation"}, "they differ"
    announced = [of[1] for of in of_chiefs if of[0] == "checkpoint"]
    assert announced == sorted(announced) and {STEPS, STEPS + 20} <= set(announced)
    assert not [one for one in lines if one["of"][0] == "failure"], "the others continue: no failure"
    assert [of for of in of_chiefs if of[0] == "end"] == [["end", STEPS, "None"], ["end", STEPS + 20, "None"]]
