"""A virtual clock: what happens at a time is called then, and nothing happens in between."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """Actions of the same time come in the order in which they were asked for. `over` ends it."""

    def __init__(self) -> None:
        self.now, self.over = 0.0, False
        self._queue: list[tuple[float, int, Callable[[], Any]]] = []
        self._sequence = 0

    def at(self, delay_s: float, action: Callable[[], Any]) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._sequence, action))

    def play(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until and not self.over:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        if not self.over:
            self.now = until
