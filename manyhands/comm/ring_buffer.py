"""Allocates messages in a ring buffer. Arithmetic only, no memory."""

from __future__ import annotations

from collections import deque

__all__ = ["RingBuffer"]

LINE = 64


class RingBuffer:
    """A ring of `num_bytes` with at most `most` messages, which are removed in the order in which they were added.

    Each message is contiguous and starts on a new cache line.
    """

    def __init__(self, num_bytes: int, most: int) -> None:
        self._num_bytes, self._most = num_bytes, most
        self._messages: deque[range] = deque()

    def put(self, length: int) -> int | None:
        """The offset of the next message; None: it does not fit now."""
        padded = max(1, -(-length // LINE)) * LINE
        start = self._free(padded)
        if start is not None:
            self._messages.append(range(start, start + padded))
        return start

    def take(self, count: int) -> None:
        """Free the `count` oldest messages."""
        for _ in range(count):
            self._messages.popleft()

    def _free(self, length: int) -> int | None:
        if len(self._messages) >= self._most:
            return None
        if not self._messages:  # start again at 0, which is in the caches
            return 0 if length <= self._num_bytes else None
        first, last = self._messages[0], self._messages[-1]
        if last.start < first.start:
            return last.stop if last.stop + length <= first.start else None
        if last.stop + length <= self._num_bytes:
            return last.stop
        return 0 if length <= first.start else None
