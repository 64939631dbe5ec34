"""Agents as placers start them: the key from a file or standard input, a lifeline, and no join file."""

from __future__ import annotations

import json
import os
import socket
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
from manyhands.errors import UsageError
from manyhands.signals import notices
from manyhands.spec.host_environment import merged, shipped
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
                # Workers that import no torch start faster than what they would be forked from.
                env={**os.environ, "TMPDIR": str(launcher.temp), "MANYHANDS_START": "spawn", **environ},
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
    flags = (
        "--ui",
        "plain",
        "--run-dir",
        "r",
        "--elastic",
        "1:3",
        "-n",
        "1",
        "--listen",
        "127.0.0.1",
        "--lifeline",
        "--grace",
        "2",
    )
    first = placed("run", *flags, "--lifeline", "train.py", MANYHANDS_KEY_FILE=str(key))
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


SEES = """
    session = join()
    session.set(f"epochs/{RANK}", f"{os.environ.get('EPOCHS')} {os.environ.get('OMP_NUM_THREADS')}".encode())
    print(*(session.get(f"epochs/{rank}", 60).decode() for rank in range(IDENTITY.world_size)), flush=True)
    mark(f"up-{RANK}")
    wait_for("go")
"""


def first_host(launcher, **more):
    run = launcher(SEES, workers=1, hosts_wanted=2, listen="127.0.0.1", join_file="join.json", **more)
    until(lambda: (run.folder / "join.json").exists())
    return run


def test_workers_of_a_joined_host_get_the_first_hosts_environment(launcher, monkeypatch):
    monkeypatch.setenv("EPOCHS", "600")
    threads = os.environ.get("OMP_NUM_THREADS")
    first = first_host(launcher)
    monkeypatch.setenv("EPOCHS", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    second = launcher(join=json.loads((first.folder / "join.json").read_text()), workers=1)
    first.wait_for("up-1")
    (first.folder / "go").touch()
    assert (first.wait(), second.wait()) == (0, 0)
    assert first.out == f"600 {threads} 600 3\n"
    assert any("EPOCHS is 2 on" in line and "and 600 on" in line for line in second.said())


@pytest.mark.parametrize("what", ["script", pytest.param("arguments", marks=pytest.mark.long)])
def test_a_host_that_would_run_something_else_is_refused_and_the_run_waits_for_another(launcher, what):
    first = first_host(launcher)
    ticket, script = json.loads((first.folder / "join.json").read_text()), first.folder / "train.py"
    text, more = script.read_text(), {}
    if what == "script":
        script.write_text(f"{text}print('another')\n")
    else:
        more["own_command"] = {"kind": "script", "target": "train.py", "args": ["--epochs", "2"]}
    other = launcher(join=ticket, workers=1, **more)
    assert other.wait() == 3
    assert ("runs another train.py (sha " if what == "script" else "runs train.py with --epochs 2, and") in other.err
    script.write_text(text)
    second = launcher(join=ticket, workers=1)
    first.wait_for("up-1")
    (first.folder / "go").touch()
    assert (first.wait(), second.wait()) == (0, 0)
    assert any("a host has left:" in event["text"] for event in first.events("Warned"))


HOSTS_OWN = [
    "SLURM_NODEID",
    "PATH",
    "TMPDIR",
    "OMP_NUM_THREADS",
    "MANYHANDS_KEY_FILE",
    "CUDA_VISIBLE_DEVICES",
    "HOSTNAME",
]
SECRETS = ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "OPENAI_KEY"]


def test_what_belongs_to_a_host_and_what_looks_like_a_secret_stays_where_it_is():
    environ = {"EPOCHS": "2", "MANYHANDS_SEED": "1", "PYTHONPATH": "/code"}
    local = dict.fromkeys([*HOSTS_OWN, *SECRETS], "here")
    assert shipped(environ | local) == environ
    merged_environment, note = merged(local | {"EPOCHS": "7"}, environ, here="n2", there="n1")
    assert merged_environment == environ | local
    assert note.startswith(
        "workers here use the environment of n1: EPOCHS is 7 on n2 and 2 on n1; MANYHANDS_SEED is not"
    )
    assert merged(local | environ, environ, here="n2", there="n1")[1] == ""
    with pytest.raises(UsageError, match="513 KiB"):
        shipped({"BIG": "x" * (513 * 1024)})


@pytest.mark.long
def test_with_torchruns_flags_a_host_with_another_script_is_refused(launcher):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = ["127.0.0.1", probe.getsockname()[1]]
    both = {"workers": 1, "hosts_wanted": 2, "master": address, "same_program": True}
    first = launcher("wait_for('go')", host_rank=0, **both)
    other = launcher("wait_for('gone')", name="other.py", host_rank=1, **both)
    assert other.wait() == 3
    assert "runs another train.py (sha " in other.err
    second = launcher("wait_for('go')", name="copy.py", host_rank=1, **both)
    (first.folder / "go").touch()
    assert (first.wait(), second.wait()) == (0, 0)
