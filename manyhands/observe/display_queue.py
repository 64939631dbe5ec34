"""The queue of a progress display: events, output and failures are taken at once, and one thread shows them.

Neither a slow terminal nor a closed pipe can delay or stop a step. What is shown is decided by the subclasses, in
`progress_display`. Start reading at `QueuedDisplay`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple, TextIO

from manyhands.events import Event, RunStarted, StepDone
from manyhands.observe.event_text import size
from manyhands.observe.output_spool import MAX_IN_MEMORY_BYTES, Spool, SpoolRange
from manyhands.observe.terminal import same_file, write_bytes

if TYPE_CHECKING:
    from manyhands.control.messages.failure import Failure

__all__ = ["QueuedDisplay", "ScriptOutput"]

TICK_S = 0.1
CLOSE_TIMEOUT_S = 2.0
MAX_EVENTS_WAITING = 10_000
# Steps processed per tick: a few show the phase times as well as thousands do, and a thread that processes every step
# would take the interpreter from the training thread.
MAX_STEPS_PER_TICK = 16
MAX_OUTPUT_WAITING_BYTES = MAX_IN_MEMORY_BYTES
MAX_REMEMBERED_BYTES = 20_000


class ScriptOutput:
    """Output of the chief, to be written to one of our streams."""

    def __init__(self, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        self.stream, self.data = stream, data


class _Spooled(NamedTuple):
    """The same, stored in the spool file."""

    stream: Literal["stdout", "stderr"]
    stored: SpoolRange


class _WaitedFor(str):
    """Lines that `close` waits for, as it does for output."""


class _Failed(_WaitedFor):
    """A failure, as text of several lines."""


class QueuedDisplay:
    """Queues everything and returns; one thread shows it. Subclasses define how; only that thread calls them."""

    def __init__(self, stdout: TextIO, stderr: TextIO) -> None:
        self._streams: dict[str, TextIO] = {"stdout": stdout, "stderr": stderr}
        self._closed_streams: set[str] = set()
        self._queue: deque[Event | ScriptOutput | _Spooled | str] = deque()
        self._stepped = False
        # Bytes of output queued and written, each counter changed by one thread only, so that no lock is needed.
        self._bytes_in = self._bytes_out = 0
        self._bytes_skipped = 0
        self._last_errors = b""
        self._spool = Spool()
        self._run = "RUN"
        self._separate_streams = not same_file(stdout, stderr)
        self._failure_threads: list[threading.Thread] = []
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="manyhands-display", daemon=True)
        self._thread.start()

    def event(self, event: Event) -> None:
        """Never blocks, never raises; events that a blocked terminal cannot show are dropped."""
        if isinstance(event, RunStarted):
            self._run = event.run
        if len(self._queue) < MAX_EVENTS_WAITING:
            self._queue.append(event)
        if isinstance(event, StepDone):
            if self._stepped:
                return  # the first step is shown at once; further steps are processed ten times a second
            self._stepped = True
        self._wake.set()

    def output(self, rank: int, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        """Write the chief's output. Never waits for its reader: beyond 64 MB in memory, output waits in a file.

        What the file cannot take, because the disk is full, is skipped, with a warning.
        """
        item: ScriptOutput | _Spooled = ScriptOutput(stream, data)
        if self._bytes_in - self._bytes_out > MAX_OUTPUT_WAITING_BYTES:
            stored = self._spool.put(data)
            if stored is None:
                self._bytes_skipped += len(data)
                return
            item = _Spooled(stream, stored)
        self._say_skipped()
        self._bytes_in += len(data)
        self._put(item)
        if stream == "stderr":
            self._last_errors = (self._last_errors + data)[-MAX_REMEMBERED_BYTES:]

    def _say_skipped(self) -> None:
        if self._bytes_skipped:
            what = f"{size(self._bytes_skipped)} of output not shown, as its reader paused and the disk is full"
            self._put_waited_for(_WaitedFor(f"warning: {what}; the whole log: mh logs {self._run} --rank 0"))
            self._bytes_skipped = 0

    def say(self, line: str) -> None:
        self._put(line)

    def failure(self, block: Failure) -> None:
        from manyhands.control.messages.failure import render

        seen = self._last_errors.decode(errors="replace").splitlines()
        text = render(block, seen=seen)
        if not self._separate_streams or self._bytes_out == self._bytes_in:
            self._put_waited_for(_Failed(text))
            return
        # Output may wait long for its reader. The failure goes to another stream, so it does not wait.
        thread = threading.Thread(target=self._show_failure, args=(text,), name="manyhands-failure", daemon=True)
        self._failure_threads.append(thread)
        thread.start()

    def _put_waited_for(self, item: _WaitedFor) -> None:
        self._bytes_in += len(item)
        self._put(item)

    def close(self) -> None:
        """Show the rest, for at most two seconds; output and failures for as long as their reader takes."""
        self._say_skipped()
        self._closing = True
        self._wake.set()
        for thread in (self._thread, *self._failure_threads):
            thread.join(CLOSE_TIMEOUT_S)
        while self._bytes_out < self._bytes_in and self._thread.is_alive():
            self._thread.join(TICK_S)
        self._thread.join(CLOSE_TIMEOUT_S)  # for the items queued after the output
        if not self._thread.is_alive():
            self._spool.close()

    def _put(self, item: ScriptOutput | _Spooled | str) -> None:
        self._queue.append(item)
        self._wake.set()

    def _work(self) -> None:
        while not self._closing:
            self._wake.wait(TICK_S)
            self._wake.clear()
            self._show_queued()
        self._show_queued()
        with _errors_ignored():
            self._finish()

    def _show_queued(self) -> None:
        steps: deque[StepDone] = deque(maxlen=MAX_STEPS_PER_TICK)
        while self._queue:
            item = self._queue.popleft()
            if isinstance(item, StepDone):
                steps.append(item)
                if self._queue:
                    continue
            with _errors_ignored():
                while steps:
                    self._show_event(steps.popleft())
                if not isinstance(item, StepDone):
                    self._show(item)
        with _errors_ignored():
            self._tick(time.monotonic())

    def _show(self, item: Event | ScriptOutput | _Spooled | str) -> None:
        if isinstance(item, ScriptOutput | _Spooled):
            output = (
                item if isinstance(item, ScriptOutput) else ScriptOutput(item.stream, self._spool.take(item.stored))
            )
            try:
                self._pass_on(output)
            finally:
                self._bytes_out += len(output.data) if isinstance(item, ScriptOutput) else item.stored.num_bytes
        elif isinstance(item, _WaitedFor):
            try:
                (self._show_failure if isinstance(item, _Failed) else self._show_line)(item)
            finally:
                self._bytes_out += len(item)
        elif isinstance(item, str):
            self._show_line(item)
        else:
            self._show_event(item)

    def _pass_on(self, output: ScriptOutput) -> None:
        self._write(output.stream, output.data)

    def _show_line(self, line: str) -> None:
        self._line(line)

    def _show_failure(self, block: str) -> None:
        self._line(block)

    def _line(self, text: str) -> None:
        """One or more complete lines to stderr."""
        self._write("stderr", text.rstrip("\n").encode(errors="replace") + b"\n")

    def _write(self, stream: str, data: bytes) -> None:
        if stream in self._closed_streams:
            return
        try:
            write_bytes(self._streams[stream], data)
        except (OSError, ValueError):  # the reader is gone, or the stream was closed: the run continues without it
            self._closed_streams.add(stream)

    def _show_event(self, event: Event) -> None: ...

    def _tick(self, now: float) -> None: ...

    def _finish(self) -> None: ...


@contextlib.contextmanager
def _errors_ignored() -> Iterator[None]:
    """An item that cannot be shown is skipped; no error reaches the training."""
    with contextlib.suppress(Exception):
        yield
