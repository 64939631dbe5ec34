"""Where a step's time is said to have gone."""

from __future__ import annotations

import pytest

from manyhands.parallel.replicas.phase_timer import Phases


def test_time_that_was_marked_is_divided_and_what_is_left_was_waiting() -> None:
    phases = Phases()
    phases.mark("load")
    phases.mark("backward")
    before = phases.seconds["backward"]
    busy = dict(phases.busy)
    phases.divide("backward", {"forward": before / 4, "backward": before / 2}, rest="reduce")
    found = [phases.seconds[name] for name in ("forward", "backward", "reduce")]
    assert found == pytest.approx([before / 4, before / 2, before / 4])
    assert phases.busy == busy, "who is slow is asked of the whole"


def test_nothing_is_taken_from_what_was_marked_before() -> None:
    phases = Phases()
    phases.mark("backward")
    before = phases.seconds["backward"]
    phases.mark("backward")
    phases.divide("backward", {"forward": 1.0}, rest="reduce")
    assert (phases.seconds["backward"], phases.seconds["reduce"]) == (pytest.approx(before), 0.0)


@pytest.mark.parametrize("together", [False, True])
def test_rows_that_ranks_load_together_count_as_waiting(together: bool) -> None:
    phases = Phases()
    phases.begin(load_s=3.0, loaded_together=together)
    assert list(phases.times()) == ([0.0] * 5 + [3.0] if together else [3.0] + [0.0] * 5)
    assert phases.seconds["load"] == 3.0
