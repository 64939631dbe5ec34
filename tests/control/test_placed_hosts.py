"""Agents as placers start them: the key from a file or standard input, a lifeline, and no join file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from manyhands.control.messages.agent_messages import LentHost
from manyhands.control.messages.launch_request import HostSeat
from manyhands.control.security.keys import new_key
from manyhands.control.session.run_client import query
from manyhands.signals import notices
from tests.control.conftest import PRELUDE, Launcher, until
from tests.control.elastic_run import PLAIN, TRAIN, Elastic, by_slot

pytestmark = pytest.mark.faults

MH = str(Path(sys.executable).with_name("mh"))


class Placed:
    """An agent with its standard input held open, as ssh or an actor holds it."""

    def __init__(self, launcher: Launcher, *words: str, first_line: str = "", **environ: str) -> None:
        self.words = words
        with open(launcher.folder / "output", "ab") as output:
            self.process = subprocess.Popen(
                [MH, *words],
                cwd=launcher.folder,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, "TMPDIR": str(launcher.temp), **environ},
            )
        assert self.process.stdin is not None
        self.process.stdin.write(first_line.encode())
        self.process.stdin.flush()

    def release(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(60)

    def shown(self) -> str:
        """Everything about its processes that another user of the machine may see."""
        family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        return "\n".join(f"{process.cmdline()} {process.environ()}" for process in family)


@pytest.fixture
def placed(launcher: Launcher) -> Any:
    started: list[Placed] = []

    def start(*words: str, **more: str) -> Placed:
        started.append(Placed(launcher, *words, **more))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait(60)


def test_hosts_join_with_a_key_from_outside_and_leave_when_their_lifeline_ends(launcher, placed):
    (launcher.folder / "train.py").write_text(PRELUDE + TRAIN + PLAIN)
    key = launcher.folder / "secret.key"
    key.write_text(new_key().hex())
    key.chmod(0o440)
    flags = ("--ui", "plain", "--run-dir", "r", "--elastic", "1:3", "-n", "1", "--listen", "127.0.0.1", "--lifeline")
    first = placed("run", *flags, "train.py", MANYHANDS_KEY_FILE=str(key))
    address = until(lambda: _address(launcher.folder), what="the address to join at")
    second = placed("agent", "--join", address, "--lifeline", MANYHANDS_KEY_FILE="-", first_line=f"{key.read_text()}\n")
    ticket = {"address": address, "run": "r", "key": key.read_text()}
    third = placed("agent", "--join", "-", "--lifeline", first_line=f"{json.dumps(ticket)}\n")

    seen = Elastic.__new__(Elastic)
    seen.folder = launcher.folder
    pids = by_slot(seen.members([0, 1, 2]))
    assert all(key.read_text() not in one.shown() for one in (first, second, third))
    assert [host.local for host in query(launcher.folder / "r").lent] == [True, False, False]
    assert second.release() == 0
    assert third.release() == 0
    assert by_slot(seen.members([0])) == {0: pids[0]}
    assert first.release() == 143  # its worker has no checkpoint to commit
    assert (launcher.folder / "output").read_text().count("SIGTERM: ") == 3


def _address(folder: Path) -> str:
    lines = (folder / "output").read_text().splitlines()
    return next((line.split("--join ")[1].split(",")[0] for line in lines if "--join" in line), "")


def test_the_end_of_a_lifeline_is_one_notice_after_the_signals_that_arrived():
    assert notices([10, 2], lifeline_ended=False) == [10, 2]
    assert notices([], lifeline_ended=True) == [15]
    assert notices([10], lifeline_ended=True) == [10, 15]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({}, "ash, 2 workers"),
        ({"seat": HostSeat(placer="slurm", job="4711", node="n2", seconds_left=11520)}, "n2 (slurm 4711, 3h12m left)"),
        ({"seat": HostSeat(placer="mpi"), "silent": True}, "ash (mpi), 2 workers, silent"),
    ],
)
def test_status_says_who_lends_a_host_and_for_how_long(more, line):
    from manyhands.cli.runs.status import host_line

    assert host_line(LentHost(agent="a", name="ash", slots=2, **more)).startswith(line)
