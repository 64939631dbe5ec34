"""Acts on what `hang_detection` decides: takes a hanging worker's stack, notes where it was, and kills it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from manyhands.control.membership.hang_detection import HangLimits, judge, place_in, waits_for_others
from manyhands.control.processes.worker_process import WorkerProcess

__all__ = ["HangWatch"]

# The agent's loop turns several times a second; after a longer break the agent itself was suspended.
OWN_BREAK_S = 1.0
# The loop also turns at every message; workers are checked at most this often.
LOOK_EVERY_S = 0.1
# A process that can still write its stack does so within milliseconds.
STACK_WAIT_S = 0.5


class HangWatch:
    def __init__(self) -> None:
        self._looked_at = self._since = 0.0

    def look(self, workers: Sequence[WorkerProcess], limits: HangLimits, now: float) -> None:
        if now - self._looked_at < LOOK_EVERY_S:
            return
        if now - self._looked_at > OWN_BREAK_S:
            self._since = now
        self._looked_at = now
        for worker in workers:
            if worker.alive and not worker.killed_by_us:
                self._judge(worker, limits, now)

    def _judge(self, worker: WorkerProcess, limits: HangLimits, now: float) -> None:
        before, verdict = worker.verdict, judge(worker.pulse(), limits, now, self._since)
        worker.verdict = verdict
        if verdict == "fine":
            return
        state = _state(worker.pid) if verdict in ("silent", "silent so far") else ""
        if state == "t":
            return  # a debugger is attached
        if state == "T":
            self._end(worker, f"no sign of life for {now - worker.heard_at:.1f} s: the process is stopped")
        elif verdict == "silent so far":
            return  # it may be importing, or reading its data
        elif verdict != before:
            worker.ask_for_stack(now)
        elif now - worker.asked_at < STACK_WAIT_S:
            return
        elif verdict == "silent":
            self._end(worker, f"no sign of life for {now - worker.heard_at:.1f} s")
        elif verdict == "stuck" and not waits_for_others(worker.stack()):
            self._end(worker, f"no progress for {now - worker.stepped_at:.1f} s")

    def _end(self, worker: WorkerProcess, why: str) -> None:
        location = place_in(worker.stack()) or worker.phase
        step = "" if worker.step is None else f"in step {worker.step}"
        worker.hung = ", ".join(part for part in (why, step, location) if part)
        worker.kill()


def _state(pid: int) -> str:
    """R, S, D, T, ...; see proc(5). The name before it may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
