"""A run's other agents, as many hosts have them, all on this machine: started, struck, and started again."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from manyhands.spec.load import CHAOS_VARIABLE, environment

__all__ = ["Agents", "workers_of"]

POLL_S = 0.05
# A machine that was lost is replaced, not at once: first it has to be missed.
RETURN_AFTER_S = 8.0
GONE_AFTER_S = 20.0


class Agents:
    """`mh agent` so many times; each has its own workers and, like any agent, a guard that ends them with it."""

    def __init__(self, count: int, words: Sequence[str], join_file: Path, said: Path) -> None:
        """`words` say how many workers each has. What they print goes to `said`."""
        self._count, self._words, self._join_file, self._said = count, words, join_file, said
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, wait_s: float, is_over: Callable[[], bool]) -> None:
        """As soon as the run tells where to join it; not if it ends before."""
        deadline = time.monotonic() + wait_s
        while not self._join_file.exists() and time.monotonic() < deadline and not is_over():
            time.sleep(POLL_S)
        if self._join_file.exists():
            self._running = [self._new() for _ in range(self._count)]

    def _new(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "manyhands.cli.main", "agent", "--join", str(self._join_file), "--ui", "none"]
        with self._said.open("ab") as said:
            return subprocess.Popen(
                [*command, *self._words],
                stdout=said,
                stderr=said,
                env={**environment(), CHAOS_VARIABLE: "1"},
                start_new_session=True,  # as the run itself
            )

    def said(self) -> str:
        """What they had to say: nothing, unless something went wrong."""
        return self._said.read_text(errors="replace") if self._said.exists() else ""

    def pids(self) -> list[int]:
        return [process.pid for process in self._running if process.poll() is None]

    def strike(self, pid: int) -> None:
        """SIGKILL: nobody says goodbye."""
        [victim] = [process for process in self._running if process.pid == pid]
        victim.kill()
        victim.wait()

    def replace_lost(self) -> None:
        """Others take the places of those that are gone."""
        self._running = [one if one.poll() is None else self._new() for one in self._running]

    def end(self) -> None:
        """After the run has ended, they end by themselves."""
        deadline = time.monotonic() + GONE_AFTER_S
        for process in self._running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()  # its guard ends what it leaves
                process.wait()


def workers_of(agent: int) -> list[int]:
    """The workers that this agent has started and that are still there."""
    found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return sorted(pid for pid in found if _is_worker_of(agent, pid))


def _is_worker_of(agent: int, pid: int) -> bool:
    """See proc(5). The name before the parent's number may hold anything."""
    process = Path(f"/proc/{pid}")
    try:
        parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        return parent == agent and b"manyhands.launcher.worker_process.bootstrap" in (process / "cmdline").read_bytes()
    except OSError:
        return False
