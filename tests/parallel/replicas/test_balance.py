"""Who is slow and who gets how many slices: decisions over plain numbers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.parallel.replicas.phase_timer import PHASES
from manyhands.parallel.replicas.straggler_detection import Pace, best_parts, better_parts, paces_of, slow_workers

seconds = st.floats(0.0, 10.0)
costs = st.floats(0.001, 10.0)


def pace(
    per_slice_s: float = 0.1, slices: int = 4, fixed_s: float = 0.0, waiting_s: float = 0.0, **more: float
) -> Pace:
    busy = {"forward": per_slice_s * slices, "update": fixed_s, **more}
    return Pace(slices, tuple(busy.get(phase, 0.0) for phase in PHASES), waiting_s)


def end(pace: Pace, parts: int) -> float:
    return pace.fixed_s + parts * pace.per_slice_s


def divisions(slices: int, workers: int) -> list[tuple[int, ...]]:
    cuts = itertools.combinations(range(1, slices), workers - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *cut, slices))) for cut in cuts]


def test_a_pace_is_what_a_worker_usually_takes() -> None:
    steps = [[[1.0, 2.0, 3.0, 0.0, 1.0, 0.5]], [[9.0, 2.0, 3.0, 0.0, 1.0, 0.5]], [[1.0, 2.0, 3.0, 0.0, 1.0, 0.7]]]
    assert paces_of(steps, [2]) == [Pace(2, (1.0, 2.0, 3.0, 0.0, 1.0), 0.5)]
    assert paces_of(steps, [2])[0].per_slice_s == 3.0


def test_a_slow_worker_is_named_with_its_phase_and_what_the_others_wait() -> None:
    paces = [pace(waiting_s=0.4), pace(waiting_s=0.5), pace(per_slice_s=0.1, backward=0.4), pace(waiting_s=0.4)]
    (slow,) = slow_workers(paces, 1.25)
    assert (slow.rank, slow.phase) == (2, "backward")
    assert slow.factor == pytest.approx(2.0)
    assert slow.waiting == pytest.approx(0.5)


def test_a_worker_with_more_slices_is_not_slow_for_that() -> None:
    assert slow_workers([pace(slices=6), pace(slices=2)], 1.25) == []
    (slow,) = slow_workers([pace(slices=6), pace(slices=2, per_slice_s=0.3)], 1.25)
    assert (slow.rank, slow.factor) == (1, pytest.approx(3.0))


def test_a_worker_without_a_slice_is_neither_slow_nor_a_measure() -> None:
    assert slow_workers([pace(), pace(slices=0)], 1.25) == []
    assert slow_workers([pace(), pace(), pace(slices=0, update=9.0)], 1.25) == []


def test_one_who_is_known_to_be_slow_has_to_come_half_way_back() -> None:
    paces = [pace(), pace(per_slice_s=0.12)]
    assert slow_workers(paces, 1.25) == []
    assert [slow.rank for slow in slow_workers(paces, 1.25, known={1})] == [1]
    assert slow_workers([pace(), pace(per_slice_s=0.11)], 1.25, known={1}) == []


@given(st.lists(costs, min_size=2, max_size=8))
def test_no_worker_is_a_straggler_if_all_are_within_the_limit(speeds: list[float]) -> None:
    named = {slow.rank for slow in slow_workers([pace(per_slice_s=one) for one in speeds], 1.25)}
    assert named <= {rank for rank, one in enumerate(speeds) if one > 1.25 * min(speeds)}
    assert len(named) < len(speeds)


@given(st.lists(st.tuples(costs, seconds), min_size=1, max_size=6), st.integers(0, 20))
def test_all_slices_are_given_out_and_everyone_has_one(workers: list[tuple[float, float]], more: int) -> None:
    paces = [pace(cost, fixed_s=fixed) for cost, fixed in workers]
    parts = best_parts(paces, len(paces) + more)
    assert sum(parts) == len(paces) + more
    assert min(parts) >= 1


@given(st.lists(st.tuples(costs, seconds), min_size=1, max_size=4), st.integers(0, 6))
def test_no_other_division_ends_earlier(workers: list[tuple[float, float]], more: int) -> None:
    paces = [pace(cost, fixed_s=fixed) for cost, fixed in workers]
    found = best_parts(paces, len(paces) + more)
    earliest = min(
        max(end(one, count) for one, count in zip(paces, parts, strict=True))
        for parts in divisions(len(paces) + more, len(paces))
    )
    assert max(end(one, count) for one, count in zip(paces, found, strict=True)) == pytest.approx(earliest)


def test_equal_workers_keep_an_even_division_and_a_slow_one_gives_slices_away() -> None:
    assert best_parts([pace(), pace()], 8) == (4, 4)
    assert better_parts([pace(), pace()], 0.1) is None
    assert better_parts([pace(), pace(per_slice_s=0.3)], 0.1) == (6, 2)


def test_slices_are_not_moved_for_a_small_gain() -> None:
    assert better_parts([pace(slices=20), pace(slices=20, per_slice_s=0.11)], 0.1) is None
    assert better_parts([pace(slices=20), pace(slices=20, per_slice_s=0.11)], 0.01) == (21, 19)


@given(st.lists(costs, min_size=2, max_size=6), st.integers(1, 6))
def test_a_division_that_was_changed_stays_while_times_do(speeds: list[float], each: int) -> None:
    paces = [pace(cost, slices=each) for cost in speeds]
    parts = better_parts(paces, 0.1)
    if parts is not None:
        assert better_parts([pace(cost, slices=n) for cost, n in zip(speeds, parts, strict=True)], 0.1) is None


def test_with_fewer_slices_than_workers_there_is_nothing_to_move() -> None:
    assert better_parts([pace(slices=1), pace(slices=1, per_slice_s=9.0), pace(slices=0)], 0.1) is None
    assert better_parts([pace(slices=1), pace(slices=1, per_slice_s=9.0)], 0.1) is None
