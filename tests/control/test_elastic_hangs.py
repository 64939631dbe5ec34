"""Workers of an elastic run that hang are found, named and replaced; one that only waits is not. No training."""

from __future__ import annotations

import re
import signal
import time

import pytest

from manyhands.control.session.run_client import query
from tests.control.conftest import alive, until
from tests.control.elastic_run import Elastic, by_slot

pytestmark = pytest.mark.faults

HANGING = """
session = begin()
for _ in range(200):
    step(session)
if IDENTITY.slot == 1 and not IDENTITY.joining:
    note("hangs", session.group)
    hang(session)
train(session)
"""


def hung(run: Elastic) -> tuple[str, float]:
    """The reason that the run gives for the loss of slot 1, and how long that took."""
    pids = by_slot(run.members([0, 1, 2]))
    run.members([0, 2])
    (loss,) = run.run.events("WorkerLost")
    (began,) = run.notes("hangs")
    took_s = min(entry["at"] for entry in run.notes() if entry["lost"]) - began["at"]
    whole = run.members([0, 1, 2], after=began["at"])
    assert (loss["rank"], loss["pid"]) == (1, pids[1])
    assert {slot: by_slot(whole)[slot] for slot in (0, 2)} == {slot: pids[slot] for slot in (0, 2)}
    run.end()
    return loss["reason"], took_s


def seconds_of(what: str, reason: str) -> float:
    """How long it lasted, as the reason has it; a busy machine looks later."""
    found = re.match(rf"hung: {what} for ([0-9.]+) s", reason)
    assert found, reason
    return float(found[1])


def test_a_stopped_process_is_found_by_its_silence(elastic):
    run = elastic("def hang(session): os.kill(os.getpid(), signal.SIGSTOP)\n" + HANGING, heartbeat_s=1.0)
    reason, took_s = hung(run)
    assert 1.0 <= seconds_of("no sign of life", reason) < 20.0
    assert "the process is stopped, in step " in reason
    assert 0.75 <= took_s < 20.0  # its last sign of life came up to 0.2 s before it hung


DEADLOCK = """
import ctypes
def hang(session):
    mutex, keeps_the_interpreter = ctypes.create_string_buffer(128), ctypes.PyDLL(None)
    keeps_the_interpreter.pthread_mutex_lock(mutex)
    keeps_the_interpreter.pthread_mutex_lock(mutex)  # for ever
"""


def test_a_deadlock_that_holds_the_interpreter_is_found_and_its_line_named(elastic):
    run = elastic("os.dup2(1, 2)\n" + DEADLOCK + HANGING, heartbeat_s=1.0)  # its stderr is not ours any more
    reason, took_s = hung(run)
    assert 1.0 <= seconds_of("no sign of life", reason) < 20.0
    lines = (run.folder / "train.py").read_text().splitlines()
    (line,) = [number for number, text in enumerate(lines, 1) if text.endswith("# for ever")]
    assert f"train.py line {line}, in hang" in reason
    assert ", in step " in reason
    assert f"line {line} in hang" in (run.run.run_dir() / "logs" / "attempt-1" / "rank-1.err").read_text()
    assert 0.75 <= took_s < 20.0


def test_a_loop_without_progress_is_found_although_its_heart_beats(elastic):
    run = elastic("def hang(session):\n    while True:\n        sum(range(1000))\n" + HANGING, hang_s=1.0)
    reason, took_s = hung(run)
    assert 2.0 <= seconds_of("no progress", reason) < 20.0
    assert ", in hang" in reason
    assert 2.0 <= took_s < 20.0


def test_a_worker_that_waits_for_others_is_not_killed_for_it(elastic):
    run = elastic("""
        session = begin()
        for _ in range(200):
            step(session)
        if IDENTITY.slot == 1:
            note("waits", session.group)
            session.get("continue", 100)
            note("continued", session.group)
        elif IDENTITY.slot == 0:
            while not (HERE / "go").exists():
                step(session)
            session.set("continue", b"")
        train(session)
    """, hang_s=1.0)  # fmt: skip
    pids = by_slot(run.members([0, 1, 2]))
    (waits,) = until(lambda: run.notes("waits"))
    log = run.run.run_dir() / "logs" / "attempt-1" / "rank-1.err"
    until(lambda: log.read_text().count("most recent call first") and time.monotonic() - waits["at"] > 2.6)
    (run.folder / "go").touch()
    until(lambda: run.notes("continued"), what="the end of its wait")
    assert alive(pids[1])
    run.end()
    assert run.run.events("WorkerLost") == []


def test_an_agent_that_was_suspended_itself_does_not_blame_its_workers(elastic):
    run = elastic(heartbeat_s=1.0)
    run.members([0, 1, 2])
    until(lambda: all(member.step for member in query(run.run.run_dir()).members), what="steps of all workers")
    run.run.process.send_signal(signal.SIGSTOP)
    time.sleep(1.7)  # longer than a heart may be silent
    run.run.process.send_signal(signal.SIGCONT)
    time.sleep(0.7)  # long enough to blame a worker
    run.end()
    assert run.run.events("WorkerLost") == []
