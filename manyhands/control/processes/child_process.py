"""A helper process of an agent, such as the coordinator, which the agent restarts when it dies.

It reads its configuration from a pipe, and exits when the pipe is closed.

The configuration, with the run's key, goes through the pipe; nothing secret is in its arguments or environment. The
same pipe is the lifeline: when it is closed the agent is gone, however it ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from manyhands import signals

__all__ = ["MAX_QUICK_DEATHS", "ChildProcess"]

TAIL_BYTES = 4000
# After this many deaths in a row, each within QUICK_S of the start, it is not restarted.
MAX_QUICK_DEATHS = 5
QUICK_S = 5.0


class ChildProcess:
    def __init__(self, module: str, config: bytes) -> None:
        self._module, self._config = module, config
        self._process: subprocess.Popen[bytes] | None = None
        self._quick_deaths = 0
        self._start()

    def _start(self) -> None:
        with signals.held_back():
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stderr is not None
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.stderr_fd = self._process.stderr.fileno()
        os.set_blocking(self.stderr_fd, False)
        self._tail = b""
        self._started_at = time.monotonic()
        try:
            self._process.stdin.write(len(self._config).to_bytes(4, "big") + self._config)
            self._process.stdin.flush()
        except BrokenPipeError:  # Dead already; the agent sees that next, by its pidfd.
            pass

    def read_stderr(self) -> bool:
        """Read standard error and keep its end; False at the end of the stream."""
        try:
            data = os.read(self.stderr_fd, 65536)
        except BlockingIOError:
            return True
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        return bool(data)

    def restart(self, *, worked: bool = False) -> bool:
        """It died, or hangs: kill it and start another. False, and none is started, if that evidently does not help.

        `worked`: it did its work before it died, so it is able to start.
        """
        quick = time.monotonic() - self._started_at < QUICK_S and not worked
        self._quick_deaths = self._quick_deaths + 1 if quick else 0
        self.kill()
        if self._quick_deaths >= MAX_QUICK_DEATHS:
            return False
        self._start()
        return True

    @property
    def last_output(self) -> str:
        """The end of its standard error."""
        return self._tail.decode(errors="replace")

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._finish()

    def close(self, timeout_s: float = 3.0) -> None:
        """Close its lifeline; the process finishes its work and exits."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout_s)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
        self._finish()

    def _finish(self) -> None:
        assert self._process is not None
        self._process.wait()
        self.read_stderr()
        for pipe in (self._process.stdin, self._process.stderr):
            try:
                if pipe is not None:
                    pipe.close()
            except BrokenPipeError:
                continue
        os.close(self.pidfd)
        self._process = None
