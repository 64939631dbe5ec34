"""Keeps a worker's output: in bounded memory until the run directory is known, then in its log files.

The last lines of standard error stay in memory for the failure block. If the log volume is full or read-only,
log bytes are dropped and counted; that never stops a run.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from pathlib import Path
from typing import Literal

from manyhands.private_files import make_directory, open_private

__all__ = ["Stream", "WorkerLog"]

Stream = Literal["stdout", "stderr"]

KEPT_BYTES = 256 * 1024
TAIL_LINES = 40
TAIL_LINE_BYTES = 400

_SUFFIX: dict[Stream, str] = {"stdout": "out", "stderr": "err"}


class WorkerLog:
    def __init__(self, name: str) -> None:
        """`name`: the first part of its file names, such as "rank-0"."""
        self._name = name
        self.headline = b""
        """Written if the files already have output of another process: a replacement appends to them."""
        self._early: deque[tuple[Stream, bytes]] = deque()
        self._early_bytes = 0
        self._fds: dict[Stream, int] = {}
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._partial = b""
        self._failed = False
        self.path = ""
        self.dropped_bytes = 0

    def write(self, stream: Stream, data: bytes) -> None:
        if stream == "stderr":
            self._remember(data)
        if self._fds or self._failed:
            self._append(stream, data)
            return
        self._early.append((stream, data))
        self._early_bytes += len(data)
        while self._early_bytes > KEPT_BYTES:
            lost = len(self._early.popleft()[1])
            self._early_bytes -= lost
            self.dropped_bytes += lost

    def move_to(self, folder: Path) -> None:
        """Open the log files in `folder` and write what was kept; files already open elsewhere are copied there."""
        before = Path(self.path).parent if self.path else None
        self.close()
        self._failed = False
        try:
            make_directory(folder)
            if before is not None:
                for suffix in _SUFFIX.values():
                    _copy(before / f"{self._name}.{suffix}", folder / f"{self._name}.{suffix}")
            for stream, suffix in _SUFFIX.items():
                path = folder / f"{self._name}.{suffix}"
                self._fds[stream] = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                if before is None and os.fstat(self._fds[stream]).st_size:
                    os.write(self._fds[stream], self.headline)
            self.path = str(folder / f"{self._name}.err")
        except OSError:
            self._failed = True
        while self._early:
            self._append(*self._early.popleft())

    def last_lines(self) -> list[str]:
        lines = [*self._tail, *([self._partial] if self._partial else [])]
        return [line.decode(errors="replace") for line in lines[-TAIL_LINES:]]

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds, self._failed = {}, True

    def _append(self, stream: Stream, data: bytes) -> None:
        fd = self._fds.get(stream)
        try:
            written = os.write(fd, data) if fd is not None else 0
        except OSError:
            written = 0
        self.dropped_bytes += len(data) - written

    def _remember(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._tail.extend(line[:TAIL_LINE_BYTES] for line in lines[-TAIL_LINES:])
        self._partial = self._partial[:TAIL_LINE_BYTES]


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as before:
        fd = open_private(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with os.fdopen(fd, "wb") as after:
            shutil.copyfileobj(before, after)
