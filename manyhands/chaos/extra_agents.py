"""The further agents of a run, as on several hosts but all on this machine: starts, kills and restarts them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from manyhands.spec.load import CHAOS_VARIABLE, environment

__all__ = ["ExtraAgents", "workers_of"]

POLL_S = 0.05
# A killed agent is replaced after this time, so that the run notices the loss of the host first.
RETURN_AFTER_S = 8.0
GONE_AFTER_S = 20.0


class ExtraAgents:
    """`count` processes of `mh agent`; each has workers and, like any agent, a guard that ends them with it."""

    def __init__(self, count: int, words: Sequence[str], join_file: Path, log: Path) -> None:
        """`words` are further arguments of each agent, such as its number of workers. Their output goes to `log`."""
        self._count, self._words, self._join_file, self._log = count, words, join_file, log
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, wait_s: float, is_over: Callable[[], bool]) -> None:
        """Start the agents as soon as the run has written its join file; not if it ends before."""
        deadline = time.monotonic() + wait_s
        while not self._join_file.exists() and time.monotonic() < deadline and not is_over():
            time.sleep(POLL_S)
        if self._join_file.exists():
            self._running = [self._new() for _ in range(self._count)]

    def _new(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "manyhands.cli.main", "agent", "--join", str(self._join_file), "--ui", "none"]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [*command, *self._words],
                stdout=log,
                stderr=log,
                env={**environment(), CHAOS_VARIABLE: "1"},
                start_new_session=True,  # as the run itself
            )

    def output(self) -> str:
        """The output of the agents: empty, unless something went wrong."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def pids(self) -> list[int]:
        return [process.pid for process in self._running if process.poll() is None]

    def strike(self, pid: int) -> None:
        """Kill an agent with SIGKILL, without a chance to sign off."""
        [victim] = [process for process in self._running if process.pid == pid]
        victim.kill()
        victim.wait()

    def replace_lost(self) -> None:
        """Start replacements for agents that have ended."""
        self._running = [one if one.poll() is None else self._new() for one in self._running]

    def end(self) -> None:
        """Wait for the agents, which end after the run; kill those that do not."""
        deadline = time.monotonic() + GONE_AFTER_S
        for process in self._running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()  # its guard ends the processes that it leaves
                process.wait()


def workers_of(agent: int) -> list[int]:
    """Process ids of this agent's live workers."""
    found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return sorted(pid for pid in found if _is_worker_of(agent, pid))


def _is_worker_of(agent: int, pid: int) -> bool:
    """See proc(5). The process name before the parent's pid may contain any character."""
    process = Path(f"/proc/{pid}")
    try:
        parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        return parent == agent and b"manyhands.launcher.worker_process.bootstrap" in (process / "cmdline").read_bytes()
    except OSError:
        return False
