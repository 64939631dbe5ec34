"""A spare server: started behind a run that trains, appointed when a server dies, and of no weight until then."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from manyhands.cli.runs.status import status
from manyhands.control.processes.cpu_priority import LOWER, hold_back, let_go
from manyhands.control.servers.spare_server import READY, wait_s
from manyhands.control.session.run_client import query, request_scale
from tests.control.conftest import until
from tests.control.servers.test_servers import Served

# The first spare does not get to the point where it waits before it is let.
SPARING = """
if IDENTITY.is_spare and not (HERE / "begun").exists():
    mark("begun")
    wait_for("go")
def serve_or_wait():
    session = Session(IDENTITY)
    session.join(RunFacts(spare=True))
    if IDENTITY.is_spare:
        session.report(0, "ready")
        if not session.await_appointment():
            note("goes")
            return
    identity = session.identity
    held = session.shared_memory(f"weights of {identity.server}", 4096).buffer
    held[0] += 1
    session.report(1, "serving")
    session.report(100, "serving")  # a server that has made progress may die again and again
    print("serves as", identity.server, flush=True)
    note("serves", number=identity.server, times=held[0], incarnation=identity.incarnation, living=session.living)
    session.await_stop()
serve_or_wait() if IDENTITY.is_server else work()
"""


def output_of(command: click.Command, folder: Path) -> str:
    return CliRunner().invoke(command, [str(folder)], catch_exceptions=False).output


def ready(folder: Path) -> int:
    return until(lambda: (spare := query(folder).spare) and spare.status == READY and spare.pid, what="a spare")


@pytest.mark.faults
def test_spares_take_over_as_far_as_they_have_started_and_are_replaced_when_any_process_dies(launcher):
    run = Served(launcher, SPARING, servers=1, workers=1)
    (first,) = run.wait("serves", 1)
    folder = run.run.run_dir()

    starting = int(run.run.wait_for("begun"))
    assert [one.server for one in query(folder).servers] == [0], "it is no server yet"
    ordinary = _share_of(first["pid"])
    os.kill(first["pid"], signal.SIGKILL)
    until(lambda: [one.pid for one in query(folder).servers] == [starting], what="the appointment")
    (run.folder / "go").touch()
    second = run.wait("serves", 2)[1]
    assert (second["pid"], second["number"], second["times"]) == (starting, 0, 2)
    assert second["incarnation"] > first["incarnation"]
    assert _share_of(starting) == ordinary

    waiting = ready(folder)
    assert _share_of(waiting) == LOWER
    os.kill(starting, signal.SIGKILL)
    third = run.wait("serves", 3)[2]
    assert (third["pid"], third["number"], third["times"]) == (waiting, 0, 3)
    assert third["living"] == {"1": 0}, "it knows who is there"

    unused = ready(folder)
    os.kill(unused, signal.SIGKILL)
    until(lambda: query(folder).spare is None, what="its end")
    os.kill(waiting, signal.SIGKILL)
    last = run.wait("serves", 4)[3]
    assert (last["number"], last["times"]) == (0, 4), "without a spare, the next one is started as before"
    ended = run.end()

    served = [one["pid"] for one in (first, second, third, last)]
    assert [event["pid"] for event in ended.events("ServerStarted")] == served
    assert [event["pid"] for event in ended.events("ServerLost")] == served[:-1]
    said = f"the spare server (pid {unused}) ended, and another one is started later: signal 9 (SIGKILL)"
    assert said in [event["text"] for event in ended.events("Warned")]
    log = (folder / "logs" / "attempt-1" / "server-0.out").read_text()
    again = [f"--- server 0 again: pid {pid} ---" for pid in served[1:]]
    assert log.splitlines() == ["serves as 0", *(line for one in again for line in (one, "serves as 0"))]


@pytest.mark.faults
def test_an_unused_spare_ends_with_the_run_and_serves_when_the_run_grows(launcher):
    run = Served(launcher, SPARING, servers=1, workers=1)
    run.wait("serves", 1)
    (run.folder / "go").touch()
    spare = ready(folder := run.run.run_dir())
    assert re.search(rf"^spare       ready, last report \d+s ago, pid {spare}$", output_of(status, folder), re.M)
    request_scale(folder, servers=2)
    assert run.wait("serves", 2)[1]["pid"] == spare
    unused = ready(folder)
    run.end()
    assert [entry["pid"] for entry in run.notes("goes")] == [unused]
    assert [event["server"] for event in run.run.events("ServerStarted")] == [0, 1]


def test_a_process_is_held_back_and_let_go():
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        before = _share_of(sleeper.pid)
        hold_back(sleeper.pid)
        assert _share_of(sleeper.pid) >= before
        until(lambda: let_go(sleeper.pid), what="its share")
        assert _share_of(sleeper.pid) == before
    finally:
        sleeper.kill()
        sleeper.communicate()
    assert let_go(sleeper.pid), "one that has ended waits for nothing"


def test_spares_that_die_are_followed_later_each_time():
    assert [wait_s(deaths) for deaths in (0, 1, 2, 3)] == [3, 6, 12, 24]
    assert wait_s(1000) == 600


def _share_of(pid: int) -> int:
    """Its niceness, or its session's where sessions share processors as groups (the first of all has none)."""
    group = Path(f"/proc/{pid}/autogroup")
    if group.exists() and (said := group.read_text().split()):
        return int(said[-1])
    return os.getpriority(os.PRIO_PROCESS, pid)
