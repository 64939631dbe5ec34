"""Making sure that a process that should be gone is gone.

Linux only: parent-death signals, pidfds and sessions. A worker leads a session of its own, so its loader processes and
other descendants can be found and killed with it. What to kill, and when, others decide.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from manyhands import signals
from manyhands.control.processes import orphan_guard
from manyhands.control.processes.private_directory import lock

__all__ = ["Guard", "Sweep", "die_with_parent", "kill_session"]

_PR_SET_PDEATHSIG = 1
SWEEP_S = 1.0
MOST_GUARDS = 5


def die_with_parent(parent: int) -> None:
    """From now on SIGKILL ends this process when its parent ends; at once if that has already happened."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_session(leader: int) -> bool:
    """Kill every process of a dead or dying worker's session; True when none is left."""
    return orphan_guard.kill_all({leader}, rounds=20)


class Sweep:
    """What a dead worker has left behind, killed in turns by somebody who has more urgent things to do meanwhile."""

    def __init__(self, leader: int) -> None:
        self._leader, self._until = leader, time.monotonic() + SWEEP_S

    def go_on(self, now: float) -> bool:
        """One more turn; True when nothing is left, or nothing helps."""
        patient = now < self._until - SWEEP_S / 5
        return orphan_guard.kill_round({self._leader}, patient=patient) or now >= self._until


class Guard:
    """The agent's end of its guard process. Every worker's session is registered before the worker does anything."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._sessions = directory, set[int]()
        self._lock = lock(directory)
        self._deaths = 0
        self._start()

    def _start(self) -> None:
        with signals.held_back():
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", orphan_guard.__file__, str(self._directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        self._pipe: IO[bytes] = self._process.stdin

    def watch(self, session: int) -> None:
        self._sessions.add(session)
        self._write(f"+{session}\n")

    def forget(self, session: int) -> None:
        self._sessions.discard(session)
        self._write(f"-{session}\n")

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError):  # it was killed; `tend` starts another, or `close` does its work
            self._pipe.write(line.encode())
            self._pipe.flush()

    def tend(self) -> str | None:
        """Start it again if it was killed; what there is to say of that."""
        if self._deaths > MOST_GUARDS or self._process.poll() is None:
            return None
        self._deaths += 1
        with contextlib.suppress(OSError):
            self._pipe.close()
        if self._deaths > MOST_GUARDS:
            return "the guard, which cleans up after a launcher that is killed, died again and is given up"
        self._start()
        for session in self._sessions:
            self._write(f"+{session}\n")
        return "the guard, which cleans up after a launcher that is killed, died; it was started again"

    def close(self, timeout_s: float = 5.0) -> None:
        """Let the guard clean up, and wait for it; if it was killed, do its work here."""
        with contextlib.suppress(OSError):
            self._pipe.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._directory.exists():
            orphan_guard.clean_up(self._sessions, str(self._directory))
        os.close(self._lock)
