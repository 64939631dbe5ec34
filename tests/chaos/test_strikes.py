"""Faults that last, against real processes."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from manyhands.chaos.extra_agents import ExtraAgents
from manyhands.chaos.fault_injection import FaultTimeline, Striker, _forbid_files
from manyhands.chaos.fault_schedule import Fault
from manyhands.control.messages.status_messages import ServerStatus, Status
from manyhands.launcher.worker_process.hang_on_signal import HANG_SIGNAL

WRITER = """
import sys
for line in sys.stdin:
    try:
        with open(line.strip(), "w") as file:
            file.write("text")
        print("written", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""
HANGS = """
import threading, time
from manyhands.launcher.worker_process.hang_on_signal import install_hang_handler
install_hang_handler()
def tick():
    while True:
        print("tick", flush=True)
        time.sleep(0.01)
threading.Thread(target=tick, daemon=True).start()
while True:
    time.sleep(0.01)
"""


@pytest.fixture
def child(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", request.param]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def no_agents(folder: Path) -> ExtraAgents:
    return ExtraAgents(0, (), folder / "join", folder / "said")


def is_stopped(process: subprocess.Popen[str]) -> bool:
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


def until(timeline: FaultTimeline, process: subprocess.Popen[str], *, stopped: bool) -> None:
    deadline = time.monotonic() + 60
    while is_stopped(process) != stopped:
        assert time.monotonic() < deadline
        timeline.play()
        time.sleep(0.005)


@pytest.mark.parametrize("child", [WRITER], indirect=True)
def test_a_slow_worker_is_stopped_and_let_go_by_turns_until_it_is_struck_for_good(
    child: subprocess.Popen[str], tmp_path: Path
) -> None:
    timeline = FaultTimeline()
    striker = Striker(tmp_path, timeline, no_agents(tmp_path), print)
    striker._pause(child.pid, time.monotonic() + 60)
    for stopped in (True, False, True):
        until(timeline, child, stopped=stopped)
    striker._doomed.add(child.pid)
    time.sleep(0.15)
    timeline.play()
    assert is_stopped(child)


@pytest.mark.parametrize("child", [WRITER], indirect=True)
def test_no_file_can_be_written_while_the_disk_is_full(child: subprocess.Popen[str], tmp_path: Path) -> None:
    def tries() -> str:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(f"{tmp_path}/file\n")
        child.stdin.flush()
        return child.stdout.readline().strip()

    striker = Striker(tmp_path, FaultTimeline(), no_agents(tmp_path), print)
    assert tries() == "written"
    striker._limits[child.pid] = _forbid_files(child.pid)
    assert tries() == "File too large"
    striker._free_disk()
    assert tries() == "written"


@pytest.mark.parametrize("child", [HANGS], indirect=True)
def test_a_worker_made_to_hang_runs_no_thread(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == "tick\n"
    child.send_signal(HANG_SIGNAL)
    deadline = time.monotonic() + 60
    while select.select([child.stdout], [], [], 0.5)[0]:  # what it said until the signal came
        assert os.read(child.stdout.fileno(), 2**16), "it has ended"
        assert time.monotonic() < deadline, "its thread still runs"


def servers(*pids: int, starting: int) -> Status:
    known = [ServerStatus(server=i, pid=pid, status="live", phase="", age_s=0.0, step=4) for i, pid in enumerate(pids)]
    fresh = ServerStatus(server=len(pids), pid=starting, status="starting", phase="", age_s=0.0)
    return Status(
        run="r", run_dir=None, generation="1.1", attempt=1, hosts=1, host="h", stop=None, coordinator_pid=0,
        members=[], servers=[*known, fresh],
    )  # fmt: skip


@pytest.mark.parametrize("child", [WRITER], indirect=True)
def test_a_serving_server_is_struck_once_and_the_next_one_is_struck_in_place_of_one_that_is_not(
    child: subprocess.Popen[str], tmp_path: Path
) -> None:
    striker = Striker(tmp_path, FaultTimeline(), no_agents(tmp_path), lambda struck: None)
    status = servers(child.pid, starting=os.getpid())
    assert striker._at(Fault(1, 0.0, "stop-server", 1), status)
    assert [(one.who, one.pid, one.step) for one in striker.strikes] == [("server 0", child.pid, 4)]
    until(FaultTimeline(), child, stopped=True)
    assert not striker._at(Fault(2, 0.0, "kill-server", 0), status), "no server is left to strike"


@pytest.mark.parametrize("child", [WRITER], indirect=True)
def test_a_template_is_stopped_once_killed_all_the_same_and_not_there_in_a_run_that_spawns(
    child: subprocess.Popen[str], tmp_path: Path
) -> None:
    striker = Striker(tmp_path, FaultTimeline(), no_agents(tmp_path), lambda struck: None)
    status = servers(starting=0)
    assert not striker._at(Fault(1, 0.0, "kill-template"), status), "there is none"
    status = msgspec.structs.replace(status, template_pid=child.pid)
    assert striker._at(Fault(2, 0.0, "stop-template"), status)
    until(FaultTimeline(), child, stopped=True)
    assert not striker._at(Fault(3, 0.0, "stop-template"), status)
    assert striker._at(Fault(4, 0.0, "kill-template"), status)
    assert child.wait(60) == -9
    assert [(one.who, one.pid) for one in striker.strikes] == [("template", child.pid)] * 2
