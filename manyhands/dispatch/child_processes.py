"""The child processes of a cluster, as their parent holds them, and what each is told when it starts.

A child leads a session of its own and dies with the thread that started it. What it does then is `child_main`.
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

__all__ = ["Child", "ChildConfig", "become_child", "in_child"]

_role = ""


class ChildConfig(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["worker", "server"]
    number: int
    hub: str
    path: list[str]
    """Where Python looks for modules, as in the parent."""
    threads: int
    steps: list[str] = []
    server: dict[str, Any] = {}


def become_child(role: str) -> None:
    """This process is one, from now on."""
    global _role
    _role = role


def in_child() -> str:
    """ "worker" or "server" in a child process of a cluster, else nothing."""
    return _role


class Child:
    """The parent's hold on one child, which leads a session of its own."""

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
        with contextlib.suppress(BrokenPipeError):  # it is dead already, and found to be
            self.process.stdin.write(msgspec.msgpack.encode(config))
            self.process.stdin.close()

    def bury(self) -> str:
        """End it, if it has not ended, with all that it started; how it ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        code = self.process.wait()
        kill_session(self.pid)
        self._guard.forget(self.pid)
        os.close(self.pidfd)
        return f"signal {-code}" if code < 0 else f"exit code {code}"
