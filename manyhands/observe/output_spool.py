"""Buffers output whose reader is slower than its writer: a little in memory, the rest in a file, in order.

A step must not wait for a pager, and a pager that pauses must not lose a byte. `Spool` stores what exceeds the memory
limit; `Passage` writes bytes in a background thread, for as long as their reader takes. The displays decide how output
is shown.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["MAX_IN_MEMORY_BYTES", "Passage", "Spool", "SpoolRange"]

MAX_IN_MEMORY_BYTES = 64 * 2**20
MAX_ON_DISK_BYTES = 16 * 2**30
TICK_S = 0.1


class SpoolRange(NamedTuple):
    """The position of some bytes in a spool."""

    offset: int
    num_bytes: int


class Spool:
    """An unnamed temporary file, made when it is first needed. One thread calls `put`, another `take`."""

    def __init__(self, max_bytes: int = MAX_ON_DISK_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._end = self._taken = 0

    def put(self, data: bytes) -> SpoolRange | None:
        """None if the disk is full or fails; then none of `data` is stored."""
        with self._lock:
            if self._taken == self._end:
                self._end = self._taken = 0  # all of it was read: start again at 0
            stored = SpoolRange(self._end, len(data))
            try:
                if stored.offset + stored.num_bytes > self._max_bytes:
                    return None
                self._write(data)
            except OSError:
                return None
            self._end += len(data)
            return stored

    def _write(self, data: bytes) -> None:
        if self._fd is None:
            with tempfile.TemporaryFile(buffering=0) as file:  # private, and deleted with its last descriptor
                self._fd = os.dup(file.fileno())
        view, at = memoryview(data), self._end
        while view:
            written = os.pwrite(self._fd, view, at)
            view, at = view[written:], at + written

    def take(self, stored: SpoolRange) -> bytes:
        """In the order of `put`, each range once."""
        with self._lock:
            data = b""
            with contextlib.suppress(OSError):
                data = os.pread(self._fd, stored.num_bytes, stored.offset) if self._fd is not None else b""
            self._taken = stored.offset + stored.num_bytes
            if self._taken == self._end and self._fd is not None:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, 0)
            return data

    def close(self) -> None:
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None


class Passage:
    """Writes bytes in order in the background. `put` never waits; `close` waits for as long as the reader takes."""

    def __init__(self, write: Callable[[bytes], None], name: str) -> None:
        """`write` may block. If it raises, the reader is gone, and the rest is dropped."""
        self._write = write
        self._queue: deque[bytes | SpoolRange] = deque()
        self._spool = Spool()
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._closed = False
        self.dropped_bytes = 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, data: bytes) -> None:
        with self._changed:
            if self._closed:
                return
            item = data if self._num_bytes < MAX_IN_MEMORY_BYTES else self._spool.put(data)
            if item is None:
                self.dropped_bytes += len(data)
                return
            self._num_bytes += len(data)
            self._queue.append(item)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        while self._thread.is_alive():
            self._thread.join(TICK_S)  # short waits, so that signals are handled meanwhile
        self._spool.close()

    def _work(self) -> None:
        while (item := self._next()) is not None:
            data = self._spool.take(item) if isinstance(item, SpoolRange) else item
            try:
                self._write(data)
            except (OSError, ValueError):
                with self._changed:
                    self._closed = True
                    self._queue.clear()
                return
            with self._changed:
                self._num_bytes -= len(data)

    def _next(self) -> bytes | SpoolRange | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            return self._queue.popleft() if self._queue else None
