"""The policy over invented jobs: what holds whatever they are, and what it prefers."""

from __future__ import annotations

import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.planner.step_time import ObservedSteps, StepTime, fit_step_time, nonnegative_least_squares
from manyhands.scheduler.packing import pack
from manyhands.scheduler.policy import JobView, allocate, speed
from manyhands.scheduler.reasons import explain

COSTS = st.floats(0.0, 2.0)
MODELS = st.none() | st.builds(StepTime, COSTS, st.floats(0.01, 50.0), COSTS, COSTS, COSTS)


@st.composite
def job_views(draw: st.DrawFn, order: int) -> JobView:
    least = draw(st.integers(1, 5))
    most = least + draw(st.integers(0, 12))
    steps = draw(st.none() | st.integers(1, 10_000))
    return JobView(
        job=f"job-{order}",
        order=order,
        least=least,
        most=most,
        workers=draw(st.just(0) | st.integers(least, most)),
        pinned=draw(st.booleans()),
        step_time=draw(MODELS),
        tried=tuple(draw(st.sets(st.integers(1, most), max_size=4))),
        steps=steps,
        steps_left=None if steps is None else draw(st.integers(0, steps)),
        age_s=draw(st.floats(0.0, 1e5)),
        mean_share=draw(st.floats(0.01, 64.0)),
        priority=draw(st.floats(0.1, 10.0)),
    )


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[JobView], list[int]]:
    """Jobs that fit on hosts as they are now."""
    hosts = draw(st.lists(st.just(draw(st.integers(1, 4))), min_size=1, max_size=5))
    jobs, free = [], sum(hosts)
    for order in range(draw(st.integers(1, 8))):
        one = draw(job_views(order))
        if one.least <= sum(hosts):
            has = one.workers if one.workers <= free else 0
            free -= has
            jobs.append(JobView(**{**{name: getattr(one, name) for name in one.__struct_fields__}, "workers": has}))
    return jobs, hosts


POLICIES = st.sampled_from(["jct", "fair", "priority"])


@settings(max_examples=40, deadline=None)
@given(clusters(), POLICIES, st.randoms(use_true_random=False))
def test_capacity_bounds_and_order_hold_for_any_jobs(cluster, policy, random):
    jobs, hosts = cluster
    decided = allocate(jobs, hosts, policy)
    assert sum(decided.workers.values()) <= sum(hosts)
    for one in jobs:
        assert decided.workers[one.job] == 0 or one.least <= decided.workers[one.job] <= one.most
    shuffled = list(jobs)
    random.shuffle(shuffled)
    assert allocate(shuffled, hosts, policy) == decided, "the order of the list must not matter"
    waiting = [one for one in jobs if not decided.workers[one.job]]
    grown = [one for one in jobs if decided.workers[one.job] > one.least]
    free = sum(hosts) - sum(decided.workers.values())
    assert all(one.least > free for one in waiting), "a job waits although there is room for its least"
    if any(one.least == 1 for one in waiting):
        assert not grown, "a job has more than its least while another one could have its own"


@settings(max_examples=25, deadline=None)
@given(clusters(), POLICIES)
def test_the_reason_is_one_line_and_there_is_one_for_every_change(cluster, policy):
    jobs, hosts = cluster
    decided = allocate(jobs, hosts, policy)
    for one in jobs:
        why = explain(one, decided, max(hosts), sum(hosts), resumes=False)
        assert "\n" not in why
        assert bool(why) == (decided.workers[one.job] != one.workers or not decided.workers[one.job])


@settings(max_examples=40, deadline=None)
@given(clusters(), POLICIES)
def test_jobs_are_packed_where_there_is_room_and_those_that_keep_their_size_stay(cluster, policy):
    jobs, hosts = cluster
    now = pack({one.job: one.workers for one in jobs if one.workers}, {}, hosts)
    decided = allocate(jobs, hosts, policy).workers
    scattered = [job for job, where in now.items() if sum(number > 0 for number in where) > 1]
    packed = pack({job: number for job, number in decided.items() if number}, now, hosts, scattered)
    for job, where in packed.items():
        assert sum(where) == decided[job]
        if sum(now.get(job, ())) == decided[job] and job not in scattered:
            assert where == now[job]
        if sum(now.get(job, ())) > decided[job]:
            assert all(new <= old for new, old in zip(where, now[job], strict=True)), "it leaves hosts, and gets none"
    assert all(sum(where[host] for where in packed.values()) <= slots for host, slots in enumerate(hosts))
    assert moves_one_by_one(now, packed, hosts), "jobs wait for each other's hosts"


def moves_one_by_one(now, packed, hosts) -> bool:
    """Whether every job reaches its place if each moves only onto workers that are free at that moment."""
    held = {job: where for job, where in now.items() if job in packed}
    for _ in range(len(packed) + 1):
        for job, where in packed.items():
            others = [held[one] for one in held if one != job]
            if all(where[host] + sum(each[host] for each in others) <= slots for host, slots in enumerate(hosts)):
                held[job] = where
    return held == packed


@settings(max_examples=25, deadline=None)
@given(clusters(), POLICIES)
def test_what_was_decided_stays_once_it_is_done(cluster, policy):
    """Hysteresis: the same jobs with their new sizes, and nothing else new, keep them."""
    jobs, hosts = cluster
    first = allocate(jobs, hosts, policy)
    sizes = {one.job: first.workers[one.job] for one in jobs}
    fields = [{name: getattr(one, name) for name in one.__struct_fields__} for one in jobs]
    after = [JobView(**{**each, "workers": sizes[each["job"]], "pinned": sizes[each["job"]] > 0}) for each in fields]
    second = allocate(after, hosts, policy).workers
    served = [one for one in jobs if sizes[one.job]]
    if len(served) == len(jobs):
        assert second == sizes


def scaling(
    job: str, order: int, steps_left: int, *, workers: int = 1, compute: float = 1.0, **more: object
) -> JobView:
    model = StepTime(constant=0.02, compute=compute)
    given = {"least": 1, "most": 16, "tried": (1, 2, 4, 8), "steps": steps_left, "steps_left": steps_left}
    return JobView(job=job, order=order, workers=workers, step_time=model, **{**given, **more})  # type: ignore[arg-type]


def test_jct_gives_more_to_the_job_that_ends_sooner_and_fair_the_same_to_both():
    jobs = [scaling("long", 0, 10_000), scaling("short", 1, 100)]
    sooner, equal = allocate(jobs, [8], "jct").workers, allocate(jobs, [8], "fair").workers
    assert sooner["short"] > sooner["long"] >= 1
    assert sooner["short"] + sooner["long"] == 8
    assert equal == {"long": 4, "short": 4}


def test_priority_counts_the_workers_of_a_job_so_much_more():
    jobs = [scaling("a", 0, 1000), scaling("b", 1, 1000, priority=4.0)]
    given = allocate(jobs, [8], "priority").workers
    assert given["b"] > given["a"] >= 1


def test_no_job_gets_workers_that_it_uses_at_less_than_half_efficiency():
    slow = scaling("slow", 0, 1000, compute=0.06, tried=(1, 2, 4, 8, 16))
    given = allocate([slow], [16], "jct").workers["slow"]
    assert slow.step_time is not None
    assert speed(slow.step_time, given, 16) >= 0.5 * given * speed(slow.step_time, 1, 16)
    assert speed(slow.step_time, given + 1, 16) < 0.5 * (given + 1) * speed(slow.step_time, 1, 16)


def test_a_size_changes_only_if_that_regains_the_pause():
    cheap = scaling("a", 0, 1000, rescale_s=1.0)
    dear = scaling("a", 0, 1000, rescale_s=500.0)
    assert allocate([cheap], [4], "jct").workers["a"] == 4
    assert allocate([dear], [4], "jct").workers["a"] == 1


def test_a_fixed_block_keeps_its_size_and_a_job_too_large_for_the_rest_lets_others_pass():
    block = JobView(job="block", order=0, least=3, most=3)
    small = JobView(job="small", order=1, least=1, most=4)
    assert allocate([block, small], [4], "jct").workers == {"block": 3, "small": 1}
    assert allocate([block, small], [2], "jct").workers == {"block": 0, "small": 1}


def test_idle_workers_try_a_size_that_was_never_measured():
    model = StepTime(constant=1.0, compute=0.1)  # it does not seem to scale
    job = JobView(
        job="a",
        order=0,
        least=1,
        most=8,
        workers=1,
        step_time=model,
        tried=(1,),
        steps=9999,
        steps_left=9999,
        rescale_s=9.0,
    )
    decided = allocate([job], [8], "jct")
    assert decided.workers == {"a": 2}
    assert decided.tries == ("a",)
    assert "idle workers measure this size" in explain(job, decided, 8, 8, resumes=False)


def test_a_long_job_is_not_starved_by_short_ones_that_keep_coming():
    """Played by rounds: one worker, a long job, and a new short job in every round."""
    left, done_at = 200, None
    for round_number in range(1, 3000):
        age = 10.0 * round_number
        long = scaling(
            "long", 0, left, workers=0, steps=200, most=1, age_s=age, mean_share=0.5, pinned=False, start_s=1.0
        )
        short = scaling("short", round_number, 10, workers=0, most=1, age_s=0.0, start_s=1.0)
        if allocate([long, short], [1], "jct").workers["long"]:
            left -= 10
        if left <= 0:
            done_at = round_number
            break
    assert done_at is not None


@pytest.mark.parametrize("seed", range(30))
def test_the_least_squares_are_those_of_scipy(seed):
    import numpy as np

    random = np.random.default_rng(seed)
    rows, columns = random.integers(4, 12), random.integers(1, 6)
    matrix, wanted = random.normal(size=(rows, columns)), random.normal(size=rows)
    matrix = abs(matrix) if seed % 3 == 0 else matrix
    found = nonnegative_least_squares(matrix.tolist(), wanted.tolist())
    best, residual = scipy.optimize.nnls(matrix, wanted)
    assert min(found) >= 0
    assert np.linalg.norm(matrix @ found - wanted) <= residual + 1e-7
    np.testing.assert_allclose(found, best, atol=1e-5)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 16), st.floats(1e-3, 100.0)), min_size=1, max_size=8))
@settings(max_examples=30, deadline=None)
def test_predicted_times_are_positive_whatever_was_observed(points):
    model = fit_step_time([ObservedSteps(min(hosts, workers), workers, 20, 20 * s) for hosts, workers, s in points])
    assert model is not None
    assert all(model.at(1, workers) > 0 for workers in range(1, 33))


def test_a_model_fitted_to_its_own_times_predicts_those_of_other_sizes():
    truth = StepTime(0.05, 2.0, 0.1, 0.2, 0.03)
    sizes = [(1, 1), (1, 2), (1, 4), (2, 8), (4, 16), (8, 16)]
    model = fit_step_time([ObservedSteps(*size, 20, 20 * truth.at(*size)) for size in sizes])
    assert model is not None
    for size in [(1, 3), (2, 6), (8, 32)]:
        assert model.at(*size) == pytest.approx(truth.at(*size), rel=0.03)


def test_one_measured_size_is_expected_to_scale():
    model = fit_step_time([ObservedSteps(1, 1, 20, 20.0)])
    assert model is not None
    assert model.at(1, 4) == pytest.approx(0.25, rel=0.01)
