"""Starts and ends the child processes of a cluster, and defines the config that each gets at its start.

A child leads a new session and dies with the thread that started it. What it runs is in `child_main`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import Any, Literal

import msgspec

from manyhands import signals
from manyhands.control.processes.fence import Guard, kill_session

__all__ = ["ChildConfig", "ClusterChild", "become_child", "in_child"]

_role = ""


class ChildConfig(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["worker", "server"]
    number: int
    hub: str
    path: list[str]
    """The parent's `sys.path`."""
    threads: int
    steps: list[str] = []
    server: dict[str, Any] = {}


def become_child(role: str) -> None:
    """Mark this process as a child of a cluster."""
    global _role
    _role = role


def in_child() -> str:
    """ "worker" or "server" in a child process of a cluster, else nothing."""
    return _role


class ClusterChild:
    """The parent's handle of one child process, which leads a new session."""

    def __init__(self, config: ChildConfig, guard: Guard, pass_fds: list[int]) -> None:
        self.role, self.number = config.role, config.number
        with signals.held_back():
            self.process = subprocess.Popen(
                [sys.executable, "-m", "manyhands.dispatch.child_main", str(os.getpid())],
                stdin=subprocess.PIPE,
                pass_fds=pass_fds,
                start_new_session=True,
            )
        self.pid = self.process.pid
        self._guard = guard
        guard.watch(self.pid)
        self.pidfd = os.pidfd_open(self.pid)
        self.ready = False
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already; its pidfd reports that
            self.process.stdin.write(msgspec.msgpack.encode(config))
            self.process.stdin.close()

    def kill(self) -> str:
        """Kill the child, if it has not ended, and every process that it started; returns how it ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        code = self.process.wait()
        kill_session(self.pid)
        self._guard.forget(self.pid)
        os.close(self.pidfd)
        return f"signal {-code}" if code < 0 else f"exit code {code}"
