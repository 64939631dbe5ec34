"""Helper processes of an agent."""

from __future__ import annotations

import select

from manyhands.control.processes.child_process import MAX_QUICK_DEATHS, ChildProcess


def test_a_process_that_dies_at_once_is_restarted_a_few_times_and_its_last_output_is_kept() -> None:
    child = ChildProcess("manyhands.no_such_module", b"")
    restarted = []
    for _ in range(MAX_QUICK_DEATHS):
        assert select.select([child.pidfd], [], [], 60)[0]
        restarted.append(child.restart())
    assert restarted == [True] * (MAX_QUICK_DEATHS - 1) + [False]
    assert "no_such_module" in child.last_output
    assert not child.is_alive
    child.close()


def test_deaths_of_a_process_that_worked_are_not_counted() -> None:
    child = ChildProcess("manyhands.no_such_module", b"")
    assert all(child.restart(worked=True) for _ in range(MAX_QUICK_DEATHS + 1))
    child.kill()
