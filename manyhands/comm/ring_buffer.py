"""Where messages lie in a stretch of memory that is used round and round. Numbers only."""

from __future__ import annotations

from collections import deque

__all__ = ["Room"]

LINE = 64


class Room:
    """`num_bytes` for messages that are taken out in the order in which they were put in, `most` of them at once.

    Each lies in one piece, and begins a cache line of its own.
    """

    def __init__(self, num_bytes: int, most: int) -> None:
        self._num_bytes, self._most = num_bytes, most
        self._held: deque[range] = deque()

    def put(self, length: int) -> int | None:
        """Where the next message begins; None: there is no room for it now."""
        whole = max(1, -(-length // LINE)) * LINE
        start = self._free(whole)
        if start is not None:
            self._held.append(range(start, start + whole))
        return start

    def take(self, count: int) -> None:
        """So many more have been taken out."""
        for _ in range(count):
            self._held.popleft()

    def _free(self, length: int) -> int | None:
        if len(self._held) >= self._most:
            return None
        if not self._held:  # back to the beginning, which is in the caches
            return 0 if length <= self._num_bytes else None
        first, last = self._held[0], self._held[-1]
        if last.start < first.start:
            return last.stop if last.stop + length <= first.start else None
        if last.stop + length <= self._num_bytes:
            return last.stop
        return 0 if length <= first.start else None
