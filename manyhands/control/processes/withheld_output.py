"""Keeps a worker's output about its own failure off the terminal: the failure block shows it once, for all workers.

The worker sends beforehand, through its lifeline, the text that it is about to print. Everything else that it writes
is shown, in order; the log files have all of it. Pure. Start reading at `WithheldOutput.passes`.
"""

from __future__ import annotations

__all__ = ["WithheldOutput"]


class WithheldOutput:
    def __init__(self, text: str) -> None:
        self._text = text.encode(errors="replace")
        self._waiting = b""

    def passes(self, data: bytes) -> bytes:
        """The part of this data, and of data held so far, that may be shown now."""
        if not self._text:
            return data
        self._waiting += data
        before, found, after = self._waiting.partition(self._text)
        if not found:
            return b""
        self._text = self._waiting = b""
        return before + after

    def rest(self) -> bytes:
        """At the end of the stream: held data that was not the announced text."""
        waiting, self._text, self._waiting = self._waiting, b"", b""
        return waiting
