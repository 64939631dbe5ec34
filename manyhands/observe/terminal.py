"""Lines that stay at the bottom of a terminal, and writing bytes to any kind of stream.

`progress_display.py` decides what the lines say. Start reading at `BottomLines`.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from manyhands.observe.notebook import shows_in_cell

__all__ = ["BottomLines", "columns", "is_terminal", "prints_above", "same_file", "same_terminal", "write_bytes"]

UNFINISHED_LINE_S = 1.0


class BottomLines:
    """The last lines of a terminal, redrawn in place while other output scrolls above. Safe from any thread."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.RLock()
        self._lines = b""
        self._num_drawn = 0
        self._in_line = False
        self._written_at = 0.0

    @property
    def is_up(self) -> bool:
        return self._num_drawn > 0

    def draw(self, lines: list[str]) -> None:
        with self._lock:
            start = b""
            if self._in_line:
                # The user's progress bar, or a prompt, is on an unfinished line: do not draw over it while it changes.
                if time.monotonic() - self._written_at < UNFINISHED_LINE_S:
                    return
                start, self._in_line = b"\r\n", False
            self._lines = "\r\n".join(lines).encode(errors="replace")
            write_bytes(self._stream, start + self._erasing() + self._redrawn())

    def above(self, data: bytes, *, whole_line: bool = False) -> None:
        """Write `data` above the lines and redraw them below it at once, so that they do not vanish until `draw`."""
        with self._lock:
            start = b"\r\n" if whole_line and self._in_line else b""
            erasing, self._in_line = self._erasing(), not data.endswith(b"\n")
            write_bytes(self._stream, erasing + start + data + (b"" if self._in_line else self._redrawn()))
            self._written_at = time.monotonic()

    def erase(self) -> None:
        """Remove the lines until the next `draw`."""
        with self._lock:
            self._lines = b""
            if self._num_drawn:
                write_bytes(self._stream, self._erasing())

    def _redrawn(self) -> bytes:
        self._num_drawn = self._lines.count(b"\r\n") + 1 if self._lines else 0
        return self._lines

    def _erasing(self) -> bytes:
        lines, self._num_drawn = self._num_drawn, 0
        return b"\r\x1b[2K" + b"\x1b[1A\x1b[2K" * (lines - 1) if lines else b""


class _PrintsAbove(io.TextIOBase):
    """Replaces `sys.stdout` while a bar is up. Unbuffered, so that a crash right after a print does not lose it."""

    def __init__(self, bar: BottomLines, stream: TextIO) -> None:
        self._bar, self._stream, self._pid = bar, stream, os.getpid()

    def write(self, text: str) -> int:
        data = text.encode(self._stream.encoding or "utf-8", errors="replace")
        if os.getpid() != self._pid:
            write_bytes(self._stream, data)  # a forked child has no bar, and may have inherited a held lock
        elif data:
            self._bar.above(data)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:  # type: ignore[override]
        self.write("".join(lines))

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    @property
    def buffer(self) -> Any:
        return self._stream.buffer


@contextlib.contextmanager
def prints_above(bar: BottomLines, terminal: TextIO) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if same_terminal(sys.stdout, terminal):
            stack.enter_context(contextlib.redirect_stdout(_PrintsAbove(bar, sys.stdout)))
        if same_terminal(sys.stderr, terminal):
            stack.enter_context(contextlib.redirect_stderr(_PrintsAbove(bar, sys.stderr)))
        yield


def write_bytes(stream: TextIO, data: bytes) -> None:
    """Write all of it, bypassing Python's buffers if there is a file, so a blocked thread holds no stream's lock."""
    try:
        fd = -1 if shows_in_cell(stream) else stream.fileno()
    except (OSError, ValueError, AttributeError):
        fd = -1
    if fd < 0:
        stream.write(data.decode(errors="replace"))
        stream.flush()
        return
    stream.flush()
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # another process on this terminal made it non-blocking
            select.select([], [fd], [], 1.0)


def is_terminal(stream: TextIO) -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return stream.isatty()
    return False


def same_file(stream: TextIO, other: TextIO) -> bool:
    """Whether both streams write to the same file, as with 2>&1. True if one has no file: then order matters."""
    try:
        one, two = os.fstat(stream.fileno()), os.fstat(other.fileno())
    except (OSError, ValueError, AttributeError):
        return True
    return (one.st_dev, one.st_ino) == (two.st_dev, two.st_ino)


def same_terminal(stream: TextIO, other: TextIO) -> bool:
    """Whether both are the same terminal."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return stream.isatty() and os.fstat(stream.fileno()).st_rdev == os.fstat(other.fileno()).st_rdev
    return False


def columns(stream: TextIO) -> int:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.get_terminal_size(stream.fileno()).columns or 80
    return 80
