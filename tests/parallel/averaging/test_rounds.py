"""When workers average, what and with whom, decided from numbers alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.parallel.averaging.rounds import Downpour, Rounds, close_round, fragments_of, pairs


def begun(rounds: Rounds, steps: int) -> dict[int, tuple[int, ...]]:
    return {step: rounds.begins(step) for step in range(steps + 1) if rounds.begins(step)}


def test_everything_is_averaged_after_every_so_many_steps() -> None:
    assert begun(Rounds(every=4), 12) == {4: (0,), 8: (0,), 12: (0,)}


def test_until_the_switch_after_every_step() -> None:
    rounds = Rounds(every=3, post_local=2)
    assert list(begun(rounds, 9)) == [1, 2, 5, 8]
    assert [step for step in range(1, 10) if rounds.closes(step)] == [1, 2, 5, 8]


def test_fragments_take_turns_over_the_round_and_arrive_later() -> None:
    rounds = Rounds(every=6, fragments=3, overlap=1)
    assert begun(rounds, 12) == {2: (1,), 4: (2,), 6: (0,), 8: (1,), 10: (2,), 12: (0,)}
    assert [rounds.ends(step) for step in range(3, 8)] == [(1,), (), (2,), (), (0,)]


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 10))
def test_every_fragment_is_averaged_once_in_every_round(every: int, fragments: int, post_local: int) -> None:
    fragments = min(fragments, every)
    rounds = Rounds(every=every, fragments=fragments, post_local=post_local)
    start = post_local + every
    found = Counter(p for step in range(start + 1, start + every + 1) for p in rounds.begins(step))
    assert found == dict.fromkeys(range(fragments), 1)


@given(st.integers(2, 40), st.integers(1, 8))
def test_nothing_is_under_way_where_a_round_closes(every: int, fragments: int) -> None:
    fragments = min(fragments, every)
    rounds = Rounds(every=every, fragments=fragments, overlap=every // fragments)
    for step in range(1, 4 * every + 1):
        if rounds.closes(step):
            started = [s for s in range(max(1, step - rounds.overlap), step) if rounds.begins(s)]
            assert all(s + rounds.overlap <= step for s in started)


def test_downpour_pulls_at_its_own_times() -> None:
    schedule = Downpour(pull_every=2, push_every=3)
    assert [step for step in range(8) if schedule.pulls(step)] == [0, 2, 4, 6]


@given(st.integers(0, 5), st.integers(0, 50), st.sets(st.integers(0, 30), max_size=9), st.randoms())
def test_every_worker_draws_the_same_pairs(seed: int, number: int, members: set[int], shuffle: object) -> None:
    order = sorted(members)
    shuffle.shuffle(order)  # type: ignore[attr-defined]
    drawn = pairs(seed, number, order)
    assert drawn == pairs(seed, number, sorted(members))
    met = [member for pair in drawn for member in pair]
    assert len(set(met)) == len(met) == len(members) // 2 * 2
    assert set(met) <= members


def test_over_the_rounds_every_worker_is_paired_with_every_other() -> None:
    met = {frozenset(pair) for number in range(60) for pair in pairs(0, number, range(5))}
    assert len(met) == 10


EXPECTED = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("arrived", "now", "found"),
    [
        ({0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}, 4.0, (4.0, (0, 1, 2, 3))),
        ({0: 1.0, 1: 2.0, 2: 3.0}, 4.0, None),
        ({0: 1.0, 1: 2.0, 2: 3.0}, 10.0, (10.0, (0, 1, 2))),
        ({0: 1.0, 1: 2.0, 3: 12.0}, 11.0, None),
        ({0: 1.0, 1: 2.0, 3: 12.0}, 12.0, (12.0, (0, 1, 3))),
        ({0: 1.0, 1: 2.0, 2: 3.0, 3: 12.0}, 13.0, (10.0, (0, 1, 2))),
        ({}, 50.0, None),
    ],
    ids=["all", "before the deadline", "at it", "no quorum", "a late quorum", "too late", "none"],
)
def test_a_round_closes_with_all_or_with_enough_at_the_deadline(
    arrived: dict[int, float], now: float, found: tuple[float, tuple[int, ...]] | None
) -> None:
    closing = close_round(arrived, EXPECTED, quorum=3, deadline_s=10.0, now_s=now)
    assert (None if closing is None else (closing.at_s, closing.members)) == found


def test_a_dead_worker_is_not_waited_for() -> None:
    closing = close_round({0: 1.0, 1: 2.0}, (0, 1), quorum=1, deadline_s=10.0, now_s=2.0)
    assert closing is not None and closing.at_s == 2.0


def test_fragments_keep_modules_together_and_are_of_about_one_size() -> None:
    names = [f"layers.{i}.{kind}" for i in range(6) for kind in ("weight", "bias")]
    fragments = fragments_of(names, [100, 10] * 6, 3)
    assert sorted(place for fragment in fragments for place in fragment) == list(range(12))
    assert fragments[0] == [0, 1, 6, 7]
    assert all(len(fragment) == 4 for fragment in fragments)
