"""Where a step's time went: load, forward, backward, reduce, update."""

from __future__ import annotations

from time import perf_counter

__all__ = ["PHASES", "Phases"]

PHASES = ("load", "forward", "backward", "reduce", "update")


class Phases:
    """A stop watch with five hands. `mark(phase)` gives the time since the last mark to that phase."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._last = perf_counter()

    def mark(self, phase: str) -> None:
        now = perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now
