"""How the processes of a run handle signals that request a stop."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from manyhands.signals import REPEAT_AFTER_S, ends_at_once

TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1


@pytest.mark.parametrize("number", [TERM, INT, USR1])
def test_the_first_signal_asks_for_a_checkpoint(number: int) -> None:
    assert not ends_at_once(number, None)


@pytest.mark.parametrize("since_s", [0.0, 0.02, 1.0, REPEAT_AFTER_S - 0.1])
def test_a_notice_that_is_sent_again_soon_does_not_cancel_the_checkpoint(since_s: float) -> None:
    assert not ends_at_once(TERM, since_s)
    assert not ends_at_once(USR1, since_s)


def test_ctrl_c_again_ends_at_once_and_so_does_any_signal_after_some_seconds() -> None:
    assert ends_at_once(INT, 0.01)
    assert ends_at_once(TERM, REPEAT_AFTER_S)


def run(code: str) -> str:
    """Run code in a new process, as signal handlers belong to a whole process."""
    words = [sys.executable, "-c", f"import os, signal, subprocess, sys, time\nfrom manyhands import signals\n{code}"]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout


def test_a_process_that_leaves_them_to_the_launcher_survives_all_and_dies_of_them_again_afterwards() -> None:
    said = run("""
child = os.fork()
if not child:
    heed = signals.leave_to_launcher()
    for number in signals.STOP_SIGNALS:
        os.kill(os.getpid(), number)
    heed()
    print("survived", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")
    assert said.split() == ["survived", "-15"]


def test_what_such_a_process_starts_can_be_terminated_by_it() -> None:
    said = run("""
signals.leave_to_launcher()
started = subprocess.Popen(["sleep", "60"])
started.terminate()
print(started.wait())
fork = os.fork()
if not fork:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]))
""")
    assert said.split() == ["-15", "-15"]


def test_a_handler_of_the_script_stays() -> None:
    said = run("""
signal.signal(signal.SIGTERM, lambda *_: print("mine"))
signals.leave_to_launcher()
os.kill(os.getpid(), signal.SIGTERM)
""")
    assert said.split() == ["mine"]


def test_a_process_started_while_they_are_held_back_does_not_die_before_it_ignores_them() -> None:
    said = run("""
code = "from manyhands import signals; signals.ignore(); input(); print('alive')"
with signals.held_back():
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True)
for number in signals.STOP_SIGNALS:
    child.send_signal(number)
child.communicate("go")
os.kill(os.getpid(), 0)
assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
""")
    assert said.split() == ["alive"]
