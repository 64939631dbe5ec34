"""What is tried, what counts as faster, and what is left alone because it would change the maths."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from manyhands.trials.tuning_search import (
    Gauge,
    Ground,
    Measured,
    Result,
    Trial,
    choose,
    flags_of,
    next_trial,
    notes,
    settings_of,
    table,
    words_of,
    worker_counts,
)

DEFAULT = Trial(workers=1, threads=4)
BEST = Trial(workers=4, threads=1)


def ground(**changes: Any) -> Ground:
    fields = {"default": DEFAULT, "slices": 1, "cores": 4, "most_workers": 4}
    return Ground(**(fields | changes))


def measured(rate: float, *, noise: float = 0.01, rows: int = 64, slices: int = 1) -> Measured:
    return Measured(rows_per_s=rate, noise=noise, steps=50, rows=rows, slices=slices)


def explore(where: Ground, rate: Any) -> list[Result]:
    """All trials on a machine where a setting is as fast as `rate(trial)` says; None: it fails."""
    results: list[Result] = []
    while (trial := next_trial(where, results)) is not None:
        assert len(results) < 30, "it has to end"
        speed = rate(trial)
        found = speed if isinstance(speed, Measured | None) else measured(speed)
        results.append(Result(trial=trial, measured=found, failed="" if found else "boom"))
    return results


def splits(results: list[Result]) -> list[tuple[int, int]]:
    return list(dict.fromkeys((result.trial.workers, result.trial.threads) for result in results))


@pytest.mark.parametrize(
    ("cores", "most", "counts"),
    [
        (1, 1, [1]),
        (2, 2, [1, 2]),
        (3, 3, [1, 3]),
        (4, 2, [1, 2]),
        (6, 6, [1, 2, 3, 6]),
        (7, 7, [1, 2, 3, 7]),
        (8, 8, [1, 2, 4, 8]),
        (96, 96, [1, 2, 4, 8, 16, 32, 48, 96]),
        (96, 10, [1, 2, 4, 8]),
        (4, 100, [1, 2, 4]),
    ],
)
def test_worker_counts_share_the_cores_evenly_and_are_few(cores: int, most: int, counts: list[int]) -> None:
    assert worker_counts(cores, most) == counts


def test_first_the_splits_then_changes_of_the_best_then_the_default_again() -> None:
    results = explore(ground(), lambda trial: 100.0 * trial.workers)
    tried = [result.trial for result in results]
    assert tried == [
        DEFAULT,
        Trial(workers=2, threads=2),
        BEST,
        replace(BEST, memory_format="channels_last"),
        replace(BEST, allocator="system"),
        DEFAULT,
    ]
    choice = choose(ground(), results)
    assert (choice.trial, choice.ratio, choice.noise) == (BEST, 4.0, 0.0)


def test_changes_that_win_are_kept_and_built_on() -> None:
    def rate(trial: Trial) -> float:
        return 100.0 * (2 if trial.threads == 2 else 1) * (1.5 if trial.allocator == "system" else 1)

    results = explore(ground(most_workers=1), rate)
    assert choose(ground(most_workers=1), results).trial == Trial(workers=1, threads=2, allocator="system")


def test_a_default_that_nothing_beats_stays_and_is_not_measured_twice() -> None:
    results = explore(ground(), lambda trial: 100.0 if trial == DEFAULT else 102.0)
    assert [result.trial for result in results].count(DEFAULT) == 1
    choice = choose(ground(), results)
    assert (choice.trial, choice.ratio) == (DEFAULT, 1.0)


def test_of_two_splits_that_are_equally_fast_the_one_with_fewer_workers_is_chosen() -> None:
    rates = {1: 100.0, 2: 198.0, 4: 200.0}
    results = explore(ground(), lambda trial: rates[trial.workers])
    assert choose(ground(), results).trial == Trial(workers=2, threads=2)


def test_a_noisy_trial_has_to_win_by_more() -> None:
    def quiet(trial: Trial) -> Measured:
        return measured(100.0 if trial == DEFAULT else 110.0, noise=0.01)

    def noisy(trial: Trial) -> Measured:
        return measured(100.0 if trial == DEFAULT else 110.0, noise=0.15)

    assert choose(ground(), explore(ground(), quiet)).trial != DEFAULT
    assert choose(ground(), explore(ground(), noisy)).trial == DEFAULT


def test_a_winner_that_the_defaults_second_run_equals_is_not_chosen() -> None:
    defaults = iter([100.0, 140.0])
    results = explore(ground(), lambda trial: next(defaults) if trial == DEFAULT else 130.0)
    assert results[-1].trial == DEFAULT
    choice = choose(ground(), results)
    assert choice.trial == DEFAULT
    assert choice.noise == pytest.approx(40 / 120)


def test_where_the_default_differs_from_itself_by_a_quarter_nothing_is_chosen_and_no_factor_is_shown() -> None:
    defaults = iter([100.0, 180.0])
    results = explore(ground(), lambda trial: next(defaults) if trial == DEFAULT else 400.0)
    choice = choose(ground(), results)
    assert choice.too_noisy and choice.trial == DEFAULT and choice.ratio == 1.0
    shown = table(ground(), results, choice)
    assert "chosen" not in shown and "  ?" in shown


def test_where_every_trial_differs_within_itself_nothing_is_chosen() -> None:
    results = explore(ground(), lambda trial: measured(100.0 + 20.0 * trial.workers, noise=0.4))
    assert choose(ground(), results).too_noisy


def test_the_noise_of_the_defaults_two_runs_counts_for_every_change() -> None:
    """Two workers win by far; channels_last, by less than the default differs from itself."""
    for second, memory_format in ((100.0, "channels_last"), (130.0, "contiguous")):
        defaults = iter([100.0, second])

        def rate(trial: Trial, defaults: Any = defaults) -> float:
            return next(defaults) if trial == DEFAULT else 100.0 * trial.workers * (1 + 0.1 * (trial != BEST))

        results = explore(ground(), rate)
        assert choose(ground(), results).trial == replace(BEST, memory_format=memory_format)


def test_what_fails_is_not_chosen() -> None:
    results = explore(ground(), lambda trial: None if trial.workers == 4 else 100.0 * trial.workers)
    assert choose(ground(), results).trial.workers == 2
    assert "failed: boom" in table(ground(), results, choose(ground(), results))


def test_a_model_that_depends_on_v_keeps_its_v_on_any_number_of_workers() -> None:
    one = ground(depends_on_slices="BatchNorm")
    results = explore(one, lambda trial: 100.0 * trial.workers)
    assert {result.trial.workers for result in results} == {1}, "V=1 is work for one worker"
    assert "the model has BatchNorm" in " ".join(notes(one, results, choose(one, results)))
    four = ground(depends_on_slices="dropout", slices=4)
    results = explore(four, lambda trial: 100.0 * trial.workers)
    assert {result.trial.workers for result in results} == {1, 2, 4}
    assert {result.trial.slices for result in results if result.trial.workers > 1} == {4}
    assert flags_of(choose(four, results).trial, DEFAULT)["train.slices"] == 4


def test_local_sgd_keeps_its_number_of_workers() -> None:
    averaging = ground(default=BEST, slices=4, averages=True)
    results = explore(averaging, lambda trial: 100.0)
    assert {workers for workers, _ in splits(results)} == {4}
    assert "--allow-maths" in notes(averaging, results, choose(averaging, results))[0]
    allowed = ground(default=BEST, slices=4, averages=True, allow_maths=True)
    assert {workers for workers, _ in splits(explore(allowed, lambda trial: 100.0))} > {4}


def test_v_follows_the_workers_where_it_does_not_matter_or_was_allowed_to() -> None:
    for where in (ground(), ground(depends_on_slices="dropout", allow_maths=True)):
        results = explore(where, lambda trial: measured(100.0 * trial.workers, slices=trial.workers))
        choice = choose(where, results)
        assert (choice.trial.workers, choice.trial.slices) == (4, None)
        text = " ".join(notes(where, results, choice))
        assert ("V=4 instead of V=1" in text) == bool(where.depends_on_slices)


def test_a_given_v_bounds_the_workers_and_needs_no_flag() -> None:
    where = ground(slices=2, slices_given=True, allow_maths=True)
    results = explore(where, lambda trial: 100.0 * trial.workers)
    assert {(result.trial.workers, result.trial.slices) for result in results} == {(1, None), (2, None)}
    assert "V=2 is given" in " ".join(notes(where, results, choose(where, results)))


def test_an_exact_run_keeps_threads_v_and_memory_format() -> None:
    where = ground(default=Trial(workers=1, threads=1), exact=True, slices=4)
    results = explore(where, lambda trial: 100.0 * trial.workers)
    assert splits(results) == [(1, 1), (2, 1), (4, 1)]
    assert {result.trial.memory_format for result in results} == {"contiguous"}
    assert {result.trial.slices for result in results if result.trial.workers > 1} == {4}


def test_bf16_is_tried_only_if_that_is_allowed() -> None:
    fast_bf16 = {"fp32": 100.0, "bf16": 300.0}
    strict, loose = ground(), ground(allow_maths=True)
    for where, precision in ((strict, "fp32"), (loose, "bf16")):
        results = explore(where, lambda trial: fast_bf16[trial.precision])
        choice = choose(where, results)
        assert choice.trial.precision == precision
        text = " ".join(notes(where, results, choice))
        assert ("--allow-maths tries it" if where is strict else "bf16 instead of fp32") in text


def test_a_batch_that_grows_with_the_workers_is_another_training() -> None:
    def per_worker(trial: Trial) -> Measured:
        return measured(100.0 * trial.workers, rows=64 * trial.workers)

    results = explore(ground(), per_worker)
    choice = choose(ground(), results)
    assert choice.trial == DEFAULT
    assert "batches of 256 rows" in table(ground(), results, choice)
    assert "batch_per_worker" in " ".join(notes(ground(), results, choice))
    allowed = ground(allow_maths=True)
    assert choose(allowed, explore(allowed, per_worker)).trial.workers == 4


def test_what_was_given_as_a_flag_stays() -> None:
    pinned = frozenset({"threads", "memory_format", "allocator", "precision"})
    where = ground(pinned=pinned, allow_maths=True, default=Trial(workers=1, threads=3, allocator="system"))
    results = explore(where, lambda trial: 100.0)
    assert {(result.trial.threads, result.trial.allocator, result.trial.precision) for result in results} == {
        (3, "system", "fp32")
    }
    assert [result.trial.workers for result in results] == [1, 2, 4]


def test_one_worker_is_all_that_is_tried_where_no_more_may_be() -> None:
    results = explore(ground(most_workers=1), lambda trial: 100.0)
    assert {result.trial.workers for result in results} == {1}


def test_flags_name_only_what_differs_and_a_config_says_all() -> None:
    chosen = Trial(workers=2, threads=2, memory_format="channels_last", precision="bf16", slices=4)
    flags = flags_of(chosen, DEFAULT)
    assert words_of(flags) == [
        *("-n", "2", "--threads", "2", "--memory-format", "channels_last", "--precision", "bf16", "--slices", "4")
    ]
    assert flags_of(DEFAULT, DEFAULT) == {}
    assert settings_of(DEFAULT, DEFAULT) == {
        "workers": 1,
        "threads": 4,
        "memory_format": "contiguous",
        "allocator": "keep",
    }
    assert words_of({"train.exact": True, "launch.allocator": "system"}) == ["--exact", "--allocator", "system"]
    assert words_of({"train.exact": False}) == ["--no-exact"]


def test_the_table_has_a_line_for_each_trial() -> None:
    results = explore(ground(), lambda trial: measured(100.0 * trial.workers, slices=trial.workers))
    lines = table(ground(), results, choose(ground(), results)).splitlines()
    assert len(lines) == 1 + len(results)
    assert lines[0].split() == [
        *("workers", "threads", "V", "memory", "allocator", "precision", "rows/s", "noise", "x", "default")
    ]
    assert lines[1].split() == ["1", "4", "1", "contiguous", "keep", "fp32", "100", "1.0%", "1.00", "default"]
    assert lines[3].split() == ["4", "1", "4", "contiguous", "keep", "fp32", "400", "1.0%", "4.00", "chosen"]


def test_a_gauge_skips_the_first_steps_and_takes_the_middle_of_the_rest() -> None:
    gauge = Gauge(seconds=1.0)
    for took_s in (0.7, 0.1, 0.1):
        gauge.add(10, took_s)
    assert gauge.measured() is None and gauge.steps == 3
    for _ in range(20):
        assert not gauge.enough
        gauge.add(10, 0.0501)
    assert gauge.enough
    found = gauge.measured(slices=2)
    assert found is not None
    assert found.rows_per_s == pytest.approx(10 / 0.0501, rel=0.01)
    assert (found.rows, found.slices) == (10, 2)
    assert found.noise < 0.01


def test_a_gauge_counts_what_every_other_step_waits_for() -> None:
    gauge = Gauge(seconds=1.0)
    for _ in range(50):
        gauge.add(10, 0.01)
        gauge.add(10, 0.03)
    found = gauge.measured()
    assert found is not None
    assert found.rows_per_s == pytest.approx(500, rel=0.05), "the median of single steps would say 333 or 1000"


def test_steps_of_uneven_length_make_noise() -> None:
    even, uneven = Gauge(seconds=1.0), Gauge(seconds=1.0)
    for number in range(83):
        even.add(10, 0.02)
        uneven.add(10, 0.01 if number // 10 % 2 else 0.03)
    quiet, loud = even.measured(), uneven.measured()
    assert quiet is not None and loud is not None
    assert loud.noise > 0.1 > quiet.noise


def test_steps_longer_than_the_time_to_measure_are_enough_after_few() -> None:
    gauge = Gauge(seconds=1.0)
    gauge.add(10, 30.0)
    assert not gauge.enough and gauge.measured() is None
    gauge.add(10, 30.0)
    assert gauge.enough
    found = gauge.measured()
    assert found is not None and found.rows_per_s == pytest.approx(1 / 3)
