"""What step times say about a run: pure."""

from __future__ import annotations

import pytest

from manyhands.profiling.step_records import StepTimes, WorkerFacts, mean_phases, waiting_by_peer
from manyhands.profiling.verdict import Round, Way, judge
from manyhands.trials.bottleneck_search import remedies_for, step_time, steps_for, ways_for

DATA = Way("data for free", cause="data", removes=True)
EXCHANGE = Way("no exchange", cause="exchange", removes=True, alone=True)
LOADERS = Way("num_workers=2", cause="data", advice="fit(..., num_workers=2)", order={"loaders": 2})
WAYS = [DATA, EXCHANGE, LOADERS]


def rounds(data: float, exchange: float, loaders: float = 1.0, drift: float = 0.0) -> list[Round]:
    """Three rounds of steps of 100 ms; `drift`: how much longer the second control of a round takes."""
    found = []
    for speed in (1.0, 1.2, 0.9):  # the machine is not equally fast in all rounds
        as_is = 0.1 * speed
        ways = {"data for free": as_is * data, "no exchange": as_is * exchange, "num_workers=2": as_is * loaders}
        found.append(Round(as_is * (1 - drift / 2), as_is * (1 + drift / 2), ways))
    return found


@pytest.mark.parametrize(
    ("data", "exchange", "expected"), [(0.3, 0.98, "data"), (0.99, 0.35, "exchange"), (0.97, 0.9, "computation")]
)
def test_the_cause_that_holds_most_of_a_step_is_named(data: float, exchange: float, expected: str) -> None:
    verdict = judge(WAYS, rounds(data, exchange))
    assert verdict.holds_back == expected
    assert sum(verdict.shares.values()) == pytest.approx(1.0)


def test_a_remedy_is_measured_against_what_the_cost_holds() -> None:
    verdict = judge(WAYS, rounds(0.82, 1.0, loaders=0.85))
    assert verdict.removed("data").saves == pytest.approx(0.18)  # type: ignore[union-attr]
    assert verdict.best_remedy("data").saves == pytest.approx(0.15)  # type: ignore[union-attr]
    assert verdict.holds_back == "computation" and verdict.shares["data"] == pytest.approx(0.18)


def test_a_saving_within_the_noise_of_two_equal_trials_is_none() -> None:
    verdict = judge(WAYS, rounds(0.9, 0.95, loaders=0.92, drift=0.15))
    assert verdict.noise.controls == pytest.approx(0.15)
    assert not any(finding.is_clear for finding in verdict.findings)
    assert verdict.shares == {"data": 0.0, "exchange": 0.0, "computation": 1.0}
    assert verdict.best_remedy("data") is None


def test_where_equal_trials_differ_wildly_nothing_is_blamed() -> None:
    assert judge(WAYS, rounds(0.9, 0.9, drift=0.6)).holds_back is None
    assert judge(WAYS, rounds(0.02, 1.0, drift=0.4)).holds_back == "data"  # 50 times faster is beyond any noise
    assert judge(WAYS, rounds(1.0, 0.25, drift=0.3)).holds_back == "exchange"  # an error of 30 % in a quarter of a step


def test_a_cost_that_could_not_be_tried_is_named_with_what_is_left() -> None:
    only_data = [Round(one.before, one.after, {"data for free": one.ways["data for free"]}) for one in rounds(0.7, 1.0)]
    divided = judge([DATA], only_data, {"no exchange": "each worker has a part of the model"})
    assert divided.holds_back == "computation or exchange" and divided.shares["data"] == pytest.approx(0.3)
    assert judge([DATA], only_data, alone=True).holds_back == "computation"


def test_one_round_that_went_wrong_does_not_decide() -> None:
    good = rounds(0.99, 0.98)
    slow = Round(0.1, 0.1, {"data for free": 0.01, "no exchange": 0.4, "num_workers=2": 0.1})
    assert judge(WAYS, [good[0], slow, good[2]]).holds_back == "computation"


def test_two_costs_that_hide_each_other_share_the_step() -> None:
    verdict = judge(WAYS, rounds(0.2, 0.3))
    assert verdict.shares["computation"] == 0.0 and verdict.shares["data"] == pytest.approx(0.8 / 1.5)


def facts(**changed: object) -> WorkerFacts:
    given = {"rank": 0, "workers": 2, "strategy": "mirrored", "slices": 2, "threads": 1, "precision": "fp32"}
    return WorkerFacts(**{**given, **changed})  # type: ignore[arg-type]


def test_only_what_can_be_tried_is_tried_and_the_rest_has_a_reason() -> None:
    names, untried = [way.name for way in ways_for(facts(), 4)[0]], ways_for(facts(), 4)[1]
    assert names == ["data for free", "no exchange", "threads=2", "num_workers=1"] and untried == {}
    ways, untried = ways_for(facts(workers=1, threads=4, fetched_by="memory"), 4)
    assert [way.name for way in ways] == ["data for free", "threads=2"]
    assert set(untried) == {"no exchange", "one more loader process"}
    ways, untried = ways_for(facts(strategy="pipeline", divided=True, exact=True), 2)
    assert "part of the model" in untried["no exchange"] and "exact" in untried["other threads"]
    assert "lease" in ways_for(facts(strategy="parameter_server", leases=True), 2)[1]["no exchange"]
    assert "threads=2" not in [way.name for way in ways_for(facts(), 4, ["threads"])[0]]


def test_remedies_follow_from_what_was_found() -> None:
    slow_data = judge(WAYS, rounds(0.4, 1.0, loaders=0.7))
    assert [way.name for way in remedies_for(slow_data, facts())] == ["num_workers=4"]
    slow_exchange = judge(WAYS, rounds(1.0, 0.4))
    named = [way.name for way in remedies_for(slow_exchange, facts(plane="gloo"))]
    assert named == ["plane=auto", "reducer=bf16"]
    assert remedies_for(slow_exchange, facts(exact=True)) == []
    assert remedies_for(judge(WAYS, rounds(1.0, 1.0)), facts()) == []


def test_short_steps_are_measured_more_often_and_long_ones_less() -> None:
    assert steps_for(0.001, 20) == 1501 and steps_for(0.0001, 20) == 4000
    assert steps_for(0.1, 20) == 20 and steps_for(5.0, 20) == 4
    assert steps_for(0.1, 20, there_are=13) == 13, "a script of 16 steps has 13 to measure"


def test_what_disturbs_a_trial_of_short_steps_for_an_instant_does_not_count() -> None:
    calm, disturbed = [0.001] * 400, [0.001] * 360 + [0.01] * 40
    assert step_time(disturbed) == pytest.approx(step_time(calm)) == pytest.approx(0.001)
    assert step_time([0.1, 0.3]) == pytest.approx(0.2), "few steps: each counts"
    assert step_time([0.001, 0.003] * 200) == pytest.approx(0.002), "so does what comes back"


def test_all_wait_for_the_worker_that_was_busy_longest() -> None:
    busy = {"load": 0.01, "forward": 0.02}
    steps = [
        StepTimes(1, 0.05, busy),
        StepTimes(2, 0.05, busy, [[0.0, 0.01, 0.01, 0.0, 0.0, 0.03], [0.02, 0.02, 0.01, 0.0, 0.0, 0.0]]),
        StepTimes(3, 0.05, busy, [[0.0, 0.01, 0.01, 0.0, 0.0, 0.01], [0.01, 0.01, 0.01, 0.0, 0.0, 0.0]]),
    ]
    assert waiting_by_peer(steps) == {(0, 1): pytest.approx(0.02)}
    means = mean_phases(steps)
    assert means["load"] == pytest.approx(0.01) and means["other"] == pytest.approx(0.02)
