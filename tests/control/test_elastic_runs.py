"""Elastic runs, end to end: real launchers, coordinators and workers, which die, come and go. No training."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from manyhands.cli.runs.scale import scale
from manyhands.control.session.run_client import query, request_scale, request_stop
from manyhands.errors import UsageError
from tests.control.conftest import alive, until
from tests.control.elastic_run import by_slot, kill

pytestmark = pytest.mark.faults


def test_a_killed_worker_is_missed_at_once_and_replaced_while_the_others_keep_their_processes(elastic):
    run = elastic("""
        print(f"slot {IDENTITY.slot} {'joins' if IDENTITY.joining else 'starts'}", flush=True)
        train(begin())
    """)
    pids = by_slot(run.members([0, 1, 2]))
    killed_at = kill(pids[1])
    survivors = run.members([0, 2])
    assert max(entry["at"] for entry in survivors) - killed_at < 1.0
    assert all(entry["lost"] for entry in survivors)
    whole = run.members([0, 1, 2], after=killed_at)
    assert [entry["slot"] for entry in whole] == [0, 2, 1], "the newcomer comes last"
    assert not any(entry["lost"] for entry in whole)
    assert {slot: by_slot(whole)[slot] for slot in (0, 2)} == {slot: pids[slot] for slot in (0, 2)}
    run.end()
    assert run.run.out == "slot 0 starts\n", "the chief's output is the run's"
    log = (run.run.run_dir() / "logs" / "attempt-1" / "rank-1.out").read_text()
    assert log == f"slot 1 starts\n--- worker 1 again: pid {by_slot(whole)[1]} ---\nslot 1 joins\n"
    started = run.run.events("WorkerStarted")
    assert [(event["slot"], event["joining"]) for event in started] == [(0, False), (1, False), (2, False), (1, True)]
    assert started[3]["pid"] == by_slot(whole)[1]
    why = [event["why"] for event in run.run.events("GenerationStarted")]
    assert why[0] == ""
    assert f"(pid {pids[1]}) died: SIGKILL" in why[1]
    assert why[2] == "1 joined"
    assert [event["pid"] for event in run.run.events("WorkerLost")] == [pids[1]]


def test_when_the_chief_is_killed_another_takes_its_place_and_its_output(elastic):
    run = elastic("""
        session = begin()
        was_chief = session.group.rank == 0
        while not (HERE / "end").exists():
            step(session)
            if session.group.rank == 0 and not was_chief:
                print("chief:", IDENTITY.slot, flush=True)
                was_chief = True
    """)
    pids = by_slot(run.members([0, 1, 2]))
    killed_at = kill(pids[0])
    assert [entry["slot"] for entry in run.members([1, 2])] == [1, 2]
    assert [entry["slot"] for entry in run.members([0, 1, 2], after=killed_at)] == [1, 2, 0]
    run.end()
    assert run.run.out == "chief: 1\n"


def test_two_killed_at_once_are_both_replaced_and_what_they_had_started_is_gone(elastic):
    run = elastic("""
        import subprocess
        loader = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        session = begin()
        note("loader", session.group, loader=loader.pid)
        train(session)
        loader.kill()
    """)
    pids = by_slot(run.members([0, 1, 2]))
    loaders = until(lambda: len(found := run.notes("loader")) == 3 and found)
    killed_at = kill(pids[0], pids[2])
    alone = run.members([1])
    assert alone[0]["pid"] == pids[1]
    assert by_slot(run.members([0, 1, 2], after=killed_at))[1] == pids[1]
    assert {entry["slot"] for entry in loaders if alive(entry["loader"])} == {1}
    run.end()
    assert len(run.run.events("WorkerStarted")) == 5


def test_below_the_lower_bound_the_living_get_a_group_to_finish_their_step_in_and_then_a_replacement(elastic):
    run = elastic("""
        session = begin()
        if IDENTITY.slot == 0:
            while session.newest is None:
                time.sleep(0.001)
            note("first received", session.newest)
            session.enter(session.await_group(0.1))
            note("entered", session.group)
        train(session)
    """, workers=2, elastic=[2, 2])  # fmt: skip
    pids = by_slot(run.members([0, 1]))
    killed_at = kill(pids[1])
    run.members([0, 1], after=killed_at)
    (received,) = run.notes("first received")
    assert received["slots"] == [0]
    assert received["lost"]
    run.end()


def test_a_run_grows_and_shrinks_as_asked_and_a_dismissed_worker_exits_without_a_signal(elastic):
    run = elastic(workers=2)
    pids = by_slot(run.members([0, 1]))
    directory = until(lambda: query(run.run.run_dir())) and run.run.run_dir()
    said = CliRunner().invoke(scale, [str(directory), "4", "--json"], catch_exceptions=False)
    assert json.loads(said.output) == {
        "run": directory.name,
        "run_dir": str(directory),
        "workers_wanted": 4,
        "elastic": [1, 4],
    }
    grown = by_slot(run.members([0, 1, 2, 3]))
    assert {slot: grown[slot] for slot in (0, 1)} == pids
    stood = until(
        lambda: next((now for now in [query(directory)] if all(one.status == "live" for one in now.members)), None),
        what="four live workers",
    )
    assert [(member.rank, member.slot) for member in stood.members] == [(rank, rank) for rank in range(4)]
    assert (stood.workers_wanted, stood.run_call) == (4, 1)
    for number, nearest in ((0, 1), (5, 4)):
        with pytest.raises(UsageError, match=f"{number} workers are outside of this run's bounds, 1 to 4") as refused:
            request_scale(directory, number)
        assert refused.value.fix == (f"mh scale {directory} {nearest}",)
    said = CliRunner().invoke(scale, [str(directory), "1"], catch_exceptions=False)
    assert said.output == f"{directory}: requested 1 worker; on this host it has 4.\n"
    (left,) = run.members([0])
    assert left["pid"] == pids[0]
    assert not left["lost"]
    until(lambda: not any(alive(grown[slot]) for slot in (1, 2, 3)), what="the end of those who left")
    assert sorted(entry["slot"] for entry in run.notes("dismissed")) == [1, 2, 3]
    until(lambda: len(query(directory).members) == 1, what="only one member")
    run.end()
    with pytest.raises(UsageError, match="is not running here"):
        request_scale(directory, 2)
    assert run.run.events("WorkerLost") == []


def test_a_dismissed_worker_that_does_not_go_is_killed_after_the_grace_time(elastic):
    run = elastic("""
        session = begin()
        if IDENTITY.slot == 1:
            while True:
                session.report(int(time.monotonic() * 100), "training", 1)
                time.sleep(0.01)
        train(session)
    """, workers=2, grace_s=0.5)  # fmt: skip
    pids = by_slot(run.members([0, 1]))
    request_scale(run.run.run_dir(), 1)
    run.members([0])
    until(lambda: not alive(pids[1]), what="the end of the dismissed worker")
    run.end()
    assert run.run.events("WorkerLost") == []


def test_a_coordinator_killed_together_with_a_worker_does_not_cost_the_others_their_processes(elastic):
    run = elastic()
    pids = by_slot(run.members([0, 1, 2]))
    coordinator = run.run.coordinator()
    killed_at = kill(coordinator.pid, pids[1])
    whole = by_slot(run.members([0, 1, 2], after=killed_at))
    assert (whole[0], whole[2]) == (pids[0], pids[2])
    run.end()
    assert len(run.run.events("WorkerStarted")) == 4


def test_a_worker_that_raises_is_named_with_its_error_and_replaced_even_if_it_does_not_end(elastic):
    run = elastic("""
        import atexit
        session = begin()
        for _ in range(100):
            step(session)
        if IDENTITY.slot == 1 and not IDENTITY.joining:
            atexit.register(time.sleep, 300)
            raise ValueError("row 17 is not a number")
        train(session)
    """, workers=2)  # fmt: skip
    pids = by_slot(run.members([0, 1]))
    run.members([0])
    whole = run.members([0, 1], after=run.members([0])[0]["at"])
    assert by_slot(whole)[0] == pids[0]
    run.end()
    (loss,) = run.run.events("WorkerLost")
    assert (loss["pid"], loss["reason"]) == (pids[1], "ValueError: row 17 is not a number")


def test_a_call_that_waits_for_a_dead_member_ends_at_once_and_the_store_serves_the_next_generation(elastic):
    run = elastic("""
        session = begin()
        if IDENTITY.slot == 0 and not IDENTITY.joining:
            session.report(1, "training", 1)
            try:
                session.get("never set", 100)
            except PeerLost as lost:
                assert not isinstance(lost, PeerTimeout)
                note("lost", session.group, text=str(lost))
            try:
                session.set("too late", b"")
            except PeerLost:
                note("still lost", session.group)
            enter(session, session.await_group(60))
            session.set("a", b"b")
            note("set", session.group, value=session.get("a", 60).decode())
        train(session)
    """, workers=2)  # fmt: skip
    pids = by_slot(run.members([0, 1]))
    until(lambda: any(member.step is not None for member in query(run.run.run_dir()).members if member.slot == 0))
    killed_at = kill(pids[1])
    (lost,) = until(lambda: run.notes("lost"), what="PeerLost")
    assert lost["at"] - killed_at < 20.0, "long before its own time is up"
    assert "is gone" in lost["text"] or "is over" in lost["text"]
    run.members([0])
    assert until(lambda: run.notes("set"))[0]["value"] == "b"
    assert len(run.notes("still lost")) == 1
    run.end()


def test_an_offer_for_a_call_that_is_over_is_answered_so_and_the_right_one_is_admitted(elastic):
    run = elastic("""
        if not IDENTITY.joining:
            session = begin()
            while not (HERE / "end").exists():
                session.report(int(time.monotonic() * 100), "training", 3)
                if (newest := session.newest) is not None:
                    enter(session, newest)
                time.sleep(0.002)
        else:
            session = join()
            assert session.run_call == 3
            assert session.offer(2, 60) is None
            enter(session, session.offer(3, 60))
            note("admitted", session.group)
            train(session)
    """, workers=2)  # fmt: skip
    pids = by_slot(run.members([0, 1]))
    until(lambda: query(run.run.run_dir()).run_call == 3, what="the call to be known")
    kill(pids[0])
    (admitted,) = until(lambda: run.notes("admitted"), what="the right offer's admission")
    assert admitted["call"] == 3
    run.end()


def test_a_run_whose_workers_are_all_killed_starts_again_as_a_new_attempt(elastic):
    run = elastic(workers=2)
    pids = by_slot(run.members([0, 1]))
    killed_at = kill(*pids.values())
    again = run.members([0, 1], after=killed_at)
    assert not set(by_slot(again).values()) & set(pids.values())
    run.end()
    assert (run.run.run_dir() / "logs" / "attempt-2" / "rank-0.out").exists()


def test_a_stop_asks_all_members_and_ends_the_run(elastic):
    run = elastic("""
        session = begin()
        while session.stop_requested is None:
            step(session)
        sys.exit(75)
    """)
    run.members([0, 1, 2])
    request_stop(run.run.run_dir())
    assert run.run.wait() == 75
    assert len(run.run.events("WorkerStarted")) == 3
