"""How long Slurm lets a job run, and how long after a notice it kills: asked once, beside the agent's loop.

`squeue` and `scontrol` may take seconds on a busy cluster, so they run as processes that the agent looks at now and
then; neither is waited for. Start reading at `SlurmTimes.poll`.
"""

from __future__ import annotations

import contextlib
import re
import subprocess

__all__ = ["SlurmTimes", "kill_wait", "time_left"]

GIVE_UP_AFTER_S = 10.0
MAX_BYTES = 65536
_LEFT = re.compile(r"(?:([0-9]{1,5})-)?(?:([0-9]{1,5}):)?([0-9]{1,5}):([0-9]{2})")


class SlurmTimes:
    def __init__(self, job: str) -> None:
        self.deadline: float | None = None
        """By `time.monotonic`: the end of the job's time limit. None: it has none, or Slurm has not said it."""
        self.kill_after_s: float | None = None
        """How long after SIGTERM Slurm sends SIGKILL."""
        self._commands = {"left": ["squeue", "-h", "-j", job, "-o", "%L"], "config": ["scontrol", "show", "config"]}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._since: float | None = None

    def poll(self, now: float) -> bool:
        """Never waits. True, once: both answers have come, or it was given up to wait for them."""
        if self._since is None:
            self._since = now
            self._start()
        elif not self._running:
            return False
        for name, process in list(self._running.items()):
            if process.poll() is not None:
                self._take(name, self._running.pop(name), now)
        if now - self._since > GIVE_UP_AFTER_S:
            self.close()
        return not self._running

    def _start(self) -> None:
        for name, words in self._commands.items():
            with contextlib.suppress(OSError):  # there is no such program here
                self._running[name] = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )

    def _take(self, name: str, process: subprocess.Popen[bytes], now: float) -> None:
        assert process.stdout is not None
        with process.stdout as stream:
            text = stream.read(MAX_BYTES).decode(errors="replace")
        if name == "config":
            self.kill_after_s = kill_wait(text)
        elif (seconds := time_left(text)) is not None:
            self.deadline = now + seconds

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._running.clear()


def time_left(text: str) -> float | None:
    """ "1-02:03:04", "2:03:04" or "59:30" in seconds; None for UNLIMITED, NOT_SET and anything else."""
    match = _LEFT.fullmatch(text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


def kill_wait(config: str) -> float | None:
    match = re.search(r"^KillWait\s*=\s*([0-9]{1,6}) sec", config, re.MULTILINE)
    return float(match[1]) if match else None
