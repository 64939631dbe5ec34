"""What a worker prints of its own failure, kept from the terminal: the failure block shows it once, for all workers.

The worker says beforehand, through its lifeline, what it is about to print. Everything else that it writes passes, in
order; the log files have all of it. Pure. Start reading at `Withheld.passes`.
"""

from __future__ import annotations

__all__ = ["Withheld"]


class Withheld:
    def __init__(self, text: str) -> None:
        self._text = text.encode(errors="replace")
        self._waiting = b""

    def passes(self, data: bytes) -> bytes:
        """What of this, and of what was kept back before, may be shown now."""
        if not self._text:
            return data
        self._waiting += data
        before, found, after = self._waiting.partition(self._text)
        if not found:
            return b""
        self._text = self._waiting = b""
        return before + after

    def rest(self) -> bytes:
        """At the end of the stream: what turned out to be something else."""
        waiting, self._text, self._waiting = self._waiting, b"", b""
        return waiting
