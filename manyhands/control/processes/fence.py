"""Makes sure that processes that should have ended have ended.

Linux only: parent-death signals, pidfds and sessions. Each worker leads its own session, so its loader processes and
other descendants can be found and killed with it. The callers decide what to kill, and when.
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
    """Have the kernel kill this process when its parent ends; at once if that has already happened."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_session(leader: int) -> bool:
    """Kill every process of a dead or dying worker's session; True when none is left."""
    killed = orphan_guard.kill_all({leader}, rounds=20)
    _reap_orphans(leader)
    return killed


def _reap_orphans(session: int) -> None:
    """Collect the dead of a worker's session. An agent that forks workers becomes the parent of their orphans."""
    for pid in orphan_guard.zombies_below(os.getpid(), session):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


class Sweep:
    """Kills the descendants of a dead worker in short rounds, so that the agent can do urgent work in between."""

    def __init__(self, leader: int) -> None:
        self._leader, self._until = leader, time.monotonic() + SWEEP_S

    def go_on(self, now: float) -> bool:
        """Run one more round; True when no process is left, or the time is up."""
        patient = now < self._until - SWEEP_S / 5
        is_over = orphan_guard.kill_round({self._leader}, patient=patient) or now >= self._until
        if is_over:
            _reap_orphans(self._leader)
        return is_over


class Guard:
    """The agent's handle of its guard process. Each worker's session is registered before the worker does anything."""

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
        with contextlib.suppress(OSError):  # the guard was killed; `tend` starts another, or `close` does its work
            self._pipe.write(line.encode())
            self._pipe.flush()

    def tend(self) -> str | None:
        """Restart the guard if it was killed; returns a warning about that."""
        if self._deaths > MOST_GUARDS or self._process.poll() is None:
            return None
        self._deaths += 1
        with contextlib.suppress(OSError):
            self._pipe.close()
        if self._deaths > MOST_GUARDS:
            return "the guard, which cleans up after a launcher that is killed, died again and is not restarted"
        self._start()
        for session in self._sessions:
            self._write(f"+{session}\n")
        return "the guard, which cleans up after a launcher that is killed, died; it was restarted"

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
