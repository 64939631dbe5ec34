"""Output whose reader is slower than its writer: in memory while it is little, then in a file, in order.

A step must not wait for a pager, and a pager that pauses must not lose a byte. `Spool` keeps what memory is too small
for; `Passage` passes bytes on from a thread of its own, for as long as their reader takes. What happens to output on
its way there is the displays' business.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["MAX_IN_MEMORY_BYTES", "Kept", "Passage", "Spool"]

MAX_IN_MEMORY_BYTES = 64 * 2**20
MAX_ON_DISK_BYTES = 16 * 2**30
TICK_S = 0.1


class Kept(NamedTuple):
    """Where in a spool some bytes are."""

    offset: int
    num_bytes: int


class Spool:
    """An unnamed file in the system's directory for such, made when it is needed. One thread puts, another takes."""

    def __init__(self, max_bytes: int = MAX_ON_DISK_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._end = self._taken = 0

    def put(self, data: bytes) -> Kept | None:
        """None where the disk takes no more; then nothing of it is kept."""
        with self._lock:
            if self._taken == self._end:
                self._end = self._taken = 0  # all of it was read: begin anew
            kept = Kept(self._end, len(data))
            try:
                if kept.offset + kept.num_bytes > self._max_bytes:
                    return None
                self._write(data)
            except OSError:
                return None
            self._end += len(data)
            return kept

    def _write(self, data: bytes) -> None:
        if self._fd is None:
            with tempfile.TemporaryFile(buffering=0) as file:  # private, and gone with its last descriptor
                self._fd = os.dup(file.fileno())
        view, at = memoryview(data), self._end
        while view:
            written = os.pwrite(self._fd, view, at)
            view, at = view[written:], at + written

    def take(self, kept: Kept) -> bytes:
        """In the order of `put`, each once."""
        with self._lock:
            data = b""
            with contextlib.suppress(OSError):
                data = os.pread(self._fd, kept.num_bytes, kept.offset) if self._fd is not None else b""
            self._taken = kept.offset + kept.num_bytes
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
    """Passes bytes on in their order. `put` waits for nobody; `close` for as long as the reader takes."""

    def __init__(self, write: Callable[[bytes], None], name: str) -> None:
        """`write` may block. What it raises ends the passage: the reader is gone, and the rest is dropped."""
        self._write = write
        self._queue: deque[bytes | Kept] = deque()
        self._spool = Spool()
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._over = False
        self.dropped_bytes = 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, data: bytes) -> None:
        with self._changed:
            if self._over:
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
            self._over = True
            self._changed.notify()
        while self._thread.is_alive():
            self._thread.join(TICK_S)  # in turns, so that a signal is handled meanwhile
        self._spool.close()

    def _work(self) -> None:
        while (item := self._next()) is not None:
            data = self._spool.take(item) if isinstance(item, Kept) else item
            try:
                self._write(data)
            except (OSError, ValueError):
                with self._changed:
                    self._over = True
                    self._queue.clear()
                return
            with self._changed:
                self._num_bytes -= len(data)

    def _next(self) -> bytes | Kept | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._over)
            return self._queue.popleft() if self._queue else None
