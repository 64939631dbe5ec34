"""Hosts that join an elastic run and leave it: by SIGTERM, killed, or away for a while. No training."""

from __future__ import annotations

import signal
import time

import pytest

from tests.control.conftest import alive
from tests.control.elastic_run import HOSTS, by_slot, kill

pytestmark = pytest.mark.faults


def test_a_joined_host_that_gets_sigterm_lets_its_workers_leave_and_ends_with_0(elastic, launcher):
    run = elastic(workers=1, **HOSTS)
    second = run.join(launcher, workers=2)
    all_of_them = run.members([0, 1, 2])
    assert [entry["hosts"] for entry in all_of_them] == [[0, 1, 1]] * 3
    pids = by_slot(all_of_them)
    second.process.send_signal(signal.SIGTERM)
    (alone,) = run.members([0])
    assert (alone["pid"], alone["lost"]) == (pids[0], False)
    assert second.wait() == 0, second.err
    assert sorted(entry["slot"] for entry in run.notes("dismissed")) == [1, 2]
    run.end()
    assert run.run.events("WorkerLost") == []


def test_a_joined_host_whose_workers_do_not_leave_in_time_kills_them_and_ends_with_143(elastic, launcher):
    run = elastic(
        """
        session = begin()
        while IDENTITY.slot and not (HERE / "end").exists():
            session.report(int(time.monotonic() * 100), "training", 1)
            time.sleep(0.01)
        train(session)
    """,
        workers=1,
        **HOSTS,
        grace_s=0.5,
    )
    second = run.join(launcher, workers=1)
    pids = by_slot(run.members([0, 1]))
    second.process.send_signal(signal.SIGTERM)
    assert second.wait() == 143
    assert not alive(pids[1])
    run.members([0])
    run.end()


def test_a_joined_host_that_is_killed_is_noticed_and_the_run_continues(elastic, launcher):
    run = elastic(workers=2, **HOSTS)
    second = run.join(launcher, workers=1)
    pids = by_slot(run.members([0, 1, 2]))
    second.process.send_signal(signal.SIGKILL)
    survivors = run.members([0, 1])
    assert all(entry["lost"] for entry in survivors)
    assert by_slot(survivors) == {0: pids[0], 1: pids[1]}
    run.end()


@pytest.mark.parametrize("restarted", [False, True], ids=["same attempt", "next attempt"])
def test_a_joined_host_that_was_away_for_a_while_ends_what_it_has_and_joins_again(elastic, launcher, restarted):
    run = elastic(workers=1, **HOSTS)
    second = run.join(launcher, workers=1)
    pids = by_slot(run.members([0, 1]))
    second.process.send_signal(signal.SIGSTOP)
    alone_at = run.members([0])[0]["at"]
    if restarted:
        kill(pids[0])
        run.members([0], after=alone_at)
    assert alive(pids[1]), "only its agent stood still"
    back_at = time.monotonic()
    second.process.send_signal(signal.SIGCONT)
    again = by_slot(run.members([0, 1], after=back_at))
    assert (again[0] == pids[0]) is not restarted
    assert again[1] != pids[1]
    assert not alive(pids[1])
    run.end()
    assert second.wait() == 0
