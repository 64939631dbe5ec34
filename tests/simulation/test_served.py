"""Runs with parameter servers full of faults, and a checker that must find nothing; with a defect, it must."""

from __future__ import annotations

import pytest

from manyhands.parameter_server.protocol.leases import Interval, Lease

from .history import Fault
from .served_checker import violations
from .served_history import Committed, Content, Died, Granted, History, Left, Met, Part, Started
from .served_world import Defects, run

CHUNKS, SEEDS_EACH = 2, 80

WITHIN = 300
"""Seeds, in which a defect must show."""


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_slice_counts_once_on_every_server_under_kills(chunk):
    for seed in range(chunk * SEEDS_EACH, (chunk + 1) * SEEDS_EACH):
        problems = violations(run(seed))
        assert not problems, f"python -m tests.simulation --served --seed {seed}\n" + "\n".join(problems[:5])


def test_the_same_seed_plays_the_same_run():
    one, other = run(7), run(7)
    assert one.events == other.events
    assert one.events != run(8).events


def times_handed_out(history: History) -> list[int]:
    items = [held.item for held in {event.held for event in history.of(Granted)}]
    return [items.count(item) for item in set(items)]


def test_the_weather_is_bad_enough():
    histories = [run(seed) for seed in range(1000, 1060)]
    faults = [fault.what for history in histories for fault in history.of(Fault)]
    for word in ("kill worker", "kill server 0", "kill server 1", "kill server 2", "request", "join", "leaves"):
        assert any(word in fault for fault in faults)
    tables = [
        event.server == 0 and event.at > 0 and history.interval.first <= event.low < history.interval.last
        for history in histories
        for event in history.of(Started)
    ]
    assert sum(tables) > 20, "the first server is lost in the middle of an interval"
    assert sum(times > 1 for history in histories for times in times_handed_out(history)) > 50
    assert any(event.why for history in histories for event in history.of(Met)), "sync points are requested"
    assert {history.ahead for history in histories} == {0, 1, 3, None}
    assert any(history.backups for history in histories)
    assert any(history.seen for history in histories), "in async, steps are applied out of order"


@pytest.mark.parametrize(
    ("defects", "promise"),
    [
        (Defects(deduplication=False), "P1"),
        (Defects(fillings=False), "P4"),
        (Defects(expecting=False), "P4"),
        (Defects(table_state=False), "M"),
        (Defects(leaving=False), "L"),
    ],
    ids=[
        *("duplicates are applied", "fillings are not compared", "leases are not awaited", "the table is not kept"),
        "leases are not given back",
    ],
)
def test_the_checker_sees_what_happens_when(defects, promise):
    assert any(problem.startswith(promise) for seed in range(WITHIN) for problem in violations(run(seed, defects)))


# ---- the checker itself: one lie each ----------------------------------------------------------------------------

INTERVAL = Interval(call=1, first=1, last=2, start_row=0, num_rows=4, batch_size=4, slices=2, whole=False)


def part(step: int, place: int, **more) -> Part:
    held = Lease(step, place, place, 10 * step + place)
    return Part(held, Content(held, **{"based_on": step - 1, "whole": True, **more}))


def commit(step: int, *parts: Part) -> Committed:
    return Committed(1.0, 0, step, parts or (part(step, 0), part(step, 1)), step, frozenset())


def grants(worker: int = 7) -> list[Granted]:
    return [Granted(0.0, worker, part(step, place).held, step - 1) for step in (1, 2) for place in (0, 1)]


def met(step: int, low: int | None = None, why: int = 0, worker: int = 7) -> Met:
    return Met(2.0, worker, step, why, ((step if low is None else low, frozenset()),))


def violations_of(*events, **more) -> str:
    fields = {"ahead": 0, "backups": 0, "num_servers": 1, "num_rows": 2, "ended_at": 9.0, **more}
    return " ".join(violations(History(0, INTERVAL, events=[*grants(), *events], **fields)))


HONEST = [commit(1), met(1), Left(3.0, 7, 1), commit(2), met(2)]


def test_an_honest_history_passes():
    assert violations_of(*HONEST) == ""


@pytest.mark.parametrize(
    ("events", "promise"),
    [
        ([commit(1), *HONEST], "P1"),
        ([commit(1), met(1), met(2)], "P1: server 0 has step 2 slice 0 0 times"),
        ([commit(1, part(1, 0)), *HONEST[1:]], "P1"),
        ([commit(1, part(1, 0), part(2, 1)), *HONEST[1:]], "P1"),
        ([commit(1, part(1, 0), part(1, 1, whole=False)), *HONEST[1:]], "P2"),
        ([*HONEST[:3], commit(2, part(2, 0), part(2, 1, based_on=0)), met(2)], "P2"),
        ([*HONEST, Started(4.0, 0, 1, frozenset())], "P3"),
        ([commit(1, part(1, 0), part(1, 1)._replace(content=None)), *HONEST[1:]], "P4"),
        ([commit(1, part(1, 0), Part(part(1, 1).held, part(1, 0).content)), *HONEST[1:]], "P4"),
        ([*HONEST[:3], commit(2, part(2, 0), part(2, 1, based_on=2)), met(2)], "P4"),
        ([*grants(worker=8), *HONEST], "P5"),
        ([commit(1), met(1, low=0), *HONEST[2:]], "M"),
        ([commit(1), met(1), met(1, why=2, worker=8), *HONEST[2:]], "M"),
        ([commit(1), met(1), commit(2), met(2)], "M: server 0 applied step 2 while"),
        ([commit(1), commit(2), met(2)], "M: no worker synchronised after [1]"),
        ([*HONEST, met(2)], "again"),
    ],
)
def test_the_checker_sees_each_lie(events, promise):
    assert promise in violations_of(*events)


def test_the_checker_sees_memory_that_grows():
    assert "P6" in violations_of(*HONEST, rows_used=3)
    assert "P6" in violations_of(*HONEST, waiting=3)
    assert "P6" in violations_of(*HONEST, seen=1)
    assert "P6" in violations_of(*HONEST, ahead=None, seen=3)


def test_the_checker_sees_a_run_that_never_ends():
    assert "L" in violations_of(*HONEST, ended_at=None)


def test_a_worker_that_dies_at_a_sync_point_does_not_hold_it_up():
    assert violations_of(commit(1), met(1), Died(3.0, 7), commit(2), met(2, worker=8)) == ""
