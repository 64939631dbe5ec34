"""A thousand runs full of faults, and a checker that must find nothing; and runs with a defect, where it must."""

from __future__ import annotations

import pytest

from .checker import violations
from .history import Adopted, Applied, Entered, Fault, Generation, History, Refused
from .world import Defects, run

CHUNKS, SEEDS_EACH = 4, 250


def troubled(seeds: range, defects: Defects | None = None) -> list[History]:
    return [run(seed, defects) for seed in seeds]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_promise_is_broken_when_processes_die_hang_or_go_missing(chunk):
    for history in troubled(range(chunk * SEEDS_EACH, (chunk + 1) * SEEDS_EACH)):
        problems = violations(history)
        assert not problems, f"python -m tests.simulation --seed {history.seed}\n" + "\n".join(problems[:5])


def test_the_same_seed_plays_the_same_run():
    one, other = run(7), run(7)
    assert one.events == other.events
    assert one.events != run(8).events


def test_the_weather_is_bad_enough():
    histories = troubled(range(5000, 5100))
    faults = " ".join(fault.what for history in histories for fault in history.of(Fault))
    for word in (
        "kill",
        "hang",
        "coordinator dies",
        "cut",
        "deaf",
        "mute",
        "scale",
        "stop",
        "leave agent",
        "lose agent",
        "abort",
    ):
        assert word in faults
    kinds = [type(event) for history in histories for event in history.events]
    assert kinds.count(Adopted) > 100, "workers join, and take over the state of others"
    assert kinds.count(Refused) > 10, "messages of generations that are over are sent, and refused"
    assert sum(history.stale for history in histories) > 10, (
        "workers that were declared gone are still there, for a while"
    )
    few = [
        sum(
            generation.name == event.generation and len(generation.group) < history.least
            for generation in history.of(Generation)
        )
        for history in histories
        for event in history.of(Applied)
    ]
    assert sum(few) > 3, "groups below the lower bound finish their step"
    generations = [generation for history in histories for generation in history.of(Generation)]
    assert sum(generation.lost for generation in generations) > 50
    assert sum(not generation.lost for generation in generations) > 150
    assert any(generation.attempt > 1 for generation in generations), "some runs lose all their workers"
    assert any(not generation.name.startswith("1.") for generation in generations), "coordinators are restarted"
    assert sum(history.exit_code == 0 for history in histories) > 75
    assert any(history.exit_code == 75 for history in histories)


def caught(defects: Defects, promise: str) -> bool:
    return any(promise in problem for seed in range(60) for problem in violations(run(seed, defects)))


def test_without_fencing_a_worker_that_was_declared_gone_spoils_a_step_and_the_checker_sees_it():
    assert caught(Defects(fencing=False), "E4")


def test_without_duplicate_detection_a_slice_counts_twice_and_the_checker_sees_it():
    assert caught(Defects(deduplication=False), "E2")


def test_without_syncing_a_generation_is_forgotten_and_the_checker_sees_it():
    assert caught(Defects(syncing=False), "E6")


# ---- the checker itself: one lie each ----------------------------------------------------------------------------


def violations_of(*events, **more) -> str:
    fields = {"seed": 0, "least": 2, "num_slices": 2, "num_steps": 1, "ended_at": 9.0, "exit_code": 0}
    history = History(**{**fields, **more})
    history.events += [Generation(0.0, "1.1", 1, (1, 2), False), *events]
    history.surviving = ["1.1", "1.2"]
    return " ".join(violations(history))


def applied(incarnation: int, step: int, **more) -> Applied:
    fields = {"generation": "1.1", "attempt": 1, "slices": (0, 1), "contributors": (1, 2), "digest": 50 + step}
    return Applied(at=1.0, incarnation=incarnation, step=step, **{**fields, **more})


def test_an_honest_history_passes():
    assert violations_of(applied(1, 1), applied(2, 1)) == ""


@pytest.mark.parametrize(
    ("events", "promise"),
    [
        ([applied(1, 1), applied(2, 1, digest=9)], "E1"),
        (
            [applied(1, 1), Generation(1.0, "1.2", 1, (1,), True), applied(1, 1, generation="1.2", contributors=(1,))],
            "E1",
        ),
        ([applied(1, 1, slices=(0, 0, 1))], "E2"),
        ([applied(1, 1, slices=(0,))], "E2"),
        ([applied(1, 1), applied(1, 2), applied(1, 1)], "E3"),
        ([applied(1, 2)], "E3"),
        ([applied(1, 1, contributors=(1,))], "E4"),
        ([applied(1, 1, contributors=(1, 2, 3))], "E4"),
        ([], "E5"),
        (
            [
                Generation(0.5, "1.2", 1, (1,), True),
                applied(1, 1, generation="1.2", contributors=(1,)),
                applied(1, 2, generation="1.2", contributors=(1,)),
            ],
            "E5: 1 workers",
        ),
        ([applied(1, 1), Generation(1.0, "1.1", 1, (1,), True)], "E6"),
        ([applied(1, 1), Generation(1.0, "1.2", 1, (3,), True)], "E6"),
        ([applied(1, 1), Entered(1.0, 1, "1.9")], "E6"),
    ],
)
def test_the_checker_sees_each_lie(events, promise):
    assert promise in violations_of(*events)


def test_the_checker_sees_a_run_that_never_ends():
    assert "E5" in violations_of(applied(1, 1), ended_at=None, exit_code=None)


def test_the_checker_sees_a_run_that_ends_as_if_stopped():
    assert "E5" in violations_of(applied(1, 1), exit_code=75)
    assert "E5" in violations_of(applied(1, 1), exit_code=143)
    assert "E5" in violations_of(applied(1, 1), exit_code=4)
