"""Writes events to disk without ever making the training loop wait.

`Recorder.emit` puts the event into a bounded queue and returns; one background thread encodes and appends JSON
lines. A full, slow or read-only disk only costs events, which are counted. `events.py` defines the events.
`read_events` and `follow` read such a file, also while it is being written, torn, or from a later version. Start
reading at `Recorder.emit`.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from manyhands import events
from manyhands.events import Event, Warned
from manyhands.private_files import make_directory, open_private

__all__ = ["Recorder", "follow", "parse_line", "read_events"]

POLL_S = 0.25
FIRST_RETRY_S = 0.5
LAST_RETRY_S = 10.0
BATCH_EVENTS = 512


class Recorder:
    """Appends events to `path`, which need not exist yet.

    When the queue is full the oldest event is dropped: after a long outage the newest events matter more. Once the
    disk accepts writes again, a `Warned` line says how many events are missing. Safe from any thread.
    """

    def __init__(self, path: Path, *, max_queue: int = 10_000) -> None:
        self.path = path
        self._queue: deque[tuple[float, Event]] = deque()
        self._max_queue = max_queue
        self._lock = threading.Lock()  # guards the queue and the count; held for microseconds, never during I/O
        self._dropped = 0
        self._reported_dropped = 0
        self._num_taken = 0
        self._file = _AppendFile(path)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="manyhands-recorder", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Number of events that are not, and will not be, on disk."""
        return self._dropped

    def emit(self, event: Event) -> None:
        """Queue an event. Never waits for the disk, never raises; takes a microsecond or two."""
        now_s = time.time()
        with self._lock:
            if self._stop.is_set():
                self._dropped += 1
                return
            if len(self._queue) >= self._max_queue:
                self._queue.popleft()
                self._dropped += 1
            self._queue.append((now_s, event))  # no wake-up: the thread polls four times a second

    def close(self, timeout_s: float = 5.0) -> None:
        """Write the queue, or give up after `timeout_s`; the rest counts as dropped."""
        self._stop.set()
        self._thread.join(timeout_s)
        with self._lock:  # empty unless the disk refused a write, or hangs
            self._dropped += len(self._queue)
            self._queue.clear()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        wait_s = POLL_S
        while not self._stop.wait(wait_s):
            wait_s = POLL_S if self._drain() else min(max(2 * wait_s, FIRST_RETRY_S), LAST_RETRY_S)
        if not self._drain():
            with self._lock:  # a pending warning about missing events precedes the batch and is not part of it
                self._dropped += min(self._num_taken, self._file.pending.count(b"\n"))
        self._file.close()

    def _drain(self) -> bool:
        """Write the whole queue; False when the disk refused a write."""
        while self._file.flush():
            self._file.pending = self._next_batch()
            if not self._file.pending:
                return True
        return False

    def _next_batch(self) -> bytes:
        with self._lock:
            taken = [self._queue.popleft() for _ in range(min(len(self._queue), BATCH_EVENTS))]
            missing, self._reported_dropped = self._dropped - self._reported_dropped, self._dropped
        lines, bad = _lines(taken)
        if missing:
            warning = Warned(time_s=time.time(), text=f"{missing} events before this one could not be recorded")
            lines = events.encode_lines([warning]) + lines
        self._num_taken = len(taken) - bad
        with self._lock:
            self._dropped += bad
        return lines


def _lines(taken: Sequence[tuple[float, Event]]) -> tuple[bytes, int]:
    """JSON lines, and the number of items without one: those that are no event, or that JSON cannot represent."""
    try:
        return events.encode_lines([_stamped(*one) for one in taken]), 0
    except (TypeError, ValueError, AttributeError):
        if len(taken) == 1:
            return b"", 1
    found = [_lines([one]) for one in taken]
    return b"".join(lines for lines, _ in found), sum(bad for _, bad in found)


def _stamped(emitted_s: float, event: Event) -> Event:
    return event if event.time_s else msgspec.structs.replace(event, time_s=emitted_s)


class _AppendFile:
    """An append-only file that may fail at any time and keeps what is still to be written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._in_line = False
        self.pending = b""

    def flush(self) -> bool:
        """Write all that is pending; False, with the rest kept, when the disk refused a write."""
        try:
            while self.pending:
                if self._fd is None:
                    self._fd = self._open()
                num_written = os.write(self._fd, self.pending)
                # A full disk may accept half a line. The other half stays pending and is written next.
                self._in_line = self.pending[num_written - 1 : num_written] != b"\n"
                self.pending = self.pending[num_written:]
        except OSError:
            self.close()
            return False
        return True

    def _open(self) -> int:
        make_directory(self._path.parent)
        fd = open_private(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        size = os.fstat(fd).st_size
        if size and not self._in_line and os.pread(fd, 1, size - 1) != b"\n":
            self.pending = b"\n" + self.pending  # an earlier process died in the middle of its last line
        return fd

    def close(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None


def read_events(path: Path) -> Iterator[Event]:
    """Every event of a file, oldest first; none when there is no file.

    Skips lines that it cannot read: a torn line, or a kind of event that a later version writes.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            if (event := parse_line(line)) is not None:
                yield event


def follow(path: Path, *, poll_s: float = 0.2, done: Callable[[], bool] = lambda: False) -> Iterator[Event]:
    """Events as they are written, from the first on; waits for the file to appear.

    Ends when `done()` is true and there is nothing left to read; without it, never.
    """
    with contextlib.ExitStack() as stack:
        file: BinaryIO | None = None
        rest = b""
        while True:
            ending = done()  # called before reading, so that everything written before the end is delivered
            if file is None and path.exists():
                file = stack.enter_context(path.open("rb"))
            fresh = file.read() if file is not None else b""
            *lines, rest = (rest + fresh).split(b"\n")
            for line in lines:
                if (event := parse_line(line)) is not None:
                    yield event
            if ending and not fresh:
                return
            if not fresh:
                time.sleep(poll_s)


def parse_line(line: bytes) -> Event | None:
    """The event on one line; None for a torn line, or a kind of event that a later version writes."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        try:
            return events.decode(line)
        except msgspec.ValidationError:
            event: Event = msgspec.convert(_with_nan(msgspec.json.decode(line)), Event)
            return event
    return None


def _with_nan(fields: Any) -> Any:
    """Earlier versions wrote numbers that are not finite as null; a required number is read as NaN."""
    if not isinstance(fields, dict):
        return fields
    for name in ("loss", "samples_per_s"):
        if name in fields and fields[name] is None:
            fields[name] = math.nan
    for name in ("results", "values", "phases"):
        if isinstance(fields.get(name), dict):
            fields[name] = {key: math.nan if value is None else value for key, value in fields[name].items()}
    return fields
