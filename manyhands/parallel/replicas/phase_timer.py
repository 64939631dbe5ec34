"""A step's time by phase: load, forward, backward, reduce, update; and how much of it was waiting for other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter

from manyhands.comm.peer_waits import Waiting

__all__ = ["PHASES", "Phases"]

PHASES = ("load", "forward", "backward", "reduce", "update")


class Phases:
    """Adds up seconds per phase. `mark(phase)` adds the time since the last mark to that phase."""

    def __init__(self) -> None:
        self.begin()

    def begin(self, waits: Sequence[Waiting] = (), load_s: float = 0.0, *, loaded_together: bool = False) -> None:
        """`waits` count the seconds of waiting for other ranks; loading has taken `load_s` already.

        With `loaded_together`, that was an exchange of rows, in which all ranks waited for the slowest.
        """
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.seconds["load"] = load_s
        self.busy = self.seconds.copy()
        """The same without waiting for other ranks."""
        if loaded_together:
            self.busy["load"] = 0.0
        self._waits, self._waited = waits, sum(one.seconds for one in waits)
        self._last, self._took = perf_counter(), 0.0

    def mark(self, phase: str) -> None:
        now, waited = perf_counter(), 0.0
        for one in self._waits:
            waited += one.seconds
        self._took = took = now - self._last
        self.seconds[phase] += took
        self.busy[phase] += took - (waited - self._waited)
        self._last, self._waited = now, waited

    def times(self) -> Sequence[float]:
        """What a rank reports of its step: busy seconds in each phase, and seconds of waiting for other ranks."""
        return *self.busy.values(), sum(self.seconds.values()) - sum(self.busy.values())

    def divide(self, phase: str, parts: Mapping[str, float], rest: str) -> None:
        """Move the time that was last added to `phase` to these parts, and the remainder to `rest`."""
        self.seconds[phase] -= self._took
        self.seconds[rest] += max(0.0, self._took - sum(parts.values()))
        for part, seconds in parts.items():
            self.seconds[part] += seconds
