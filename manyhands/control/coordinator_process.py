"""The coordinator as its agent sees it: a child that is started, fed its configuration, and started again when it dies.

The configuration, the run's key included, goes through a pipe; nothing secret is in its arguments or environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import msgspec

from manyhands.control.coordinator import CoordinatorConfig
from manyhands.errors import ManyhandsError

__all__ = ["CoordinatorProcess"]

# This often in a row, at once, means that starting it again does not help.
MAX_QUICK_DEATHS = 5
QUICK_S = 5.0
TAIL_BYTES = 4000


class CoordinatorProcess:
    def __init__(self, config: CoordinatorConfig) -> None:
        self._config = msgspec.msgpack.encode(config)
        self._quick_deaths = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.restarts = 0
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "manyhands.control.coordinator"],
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
        self.tail = b""
        self._started = time.monotonic()
        try:
            self._process.stdin.write(len(self._config).to_bytes(4, "big") + self._config)
            self._process.stdin.flush()
        except BrokenPipeError:  # Dead already; its pidfd says so next.
            pass

    def read_stderr(self) -> bool:
        """Keep the end of what it says; False when there is no more to come."""
        try:
            data = os.read(self.stderr_fd, 65536)
        except BlockingIOError:
            return True
        self.tail = (self.tail + data)[-TAIL_BYTES:]
        return bool(data)

    def restart(self, *, worked: bool = False) -> None:
        """It died, or hangs: end it for good and start another. Raises when that plainly does not help.

        `worked`: it gave orders before it died, so whatever killed it, starting it is not in vain.
        """
        quick = time.monotonic() - self._started < QUICK_S and not worked
        self._quick_deaths = self._quick_deaths + 1 if quick else 0
        self.kill()
        if self._quick_deaths >= MAX_QUICK_DEATHS:
            said = self.tail.decode(errors="replace")
            raise ManyhandsError(f"The coordinator died {self._quick_deaths} times in a row. It said: {said}")
        self.restarts += 1
        self._start()

    def kill(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._finish()

    def close(self, timeout_s: float = 3.0) -> None:
        """End its lifeline; it sends its last orders and goes."""
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
