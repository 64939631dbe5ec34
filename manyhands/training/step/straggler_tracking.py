"""Watches how fast the workers are: who is slow is named, and with `balance` its slices go to faster ones.

Every worker is told all workers' times with every step (`StepStats.times`), so every worker keeps the same window and
decides the same. What is decided is in `parallel.replicas.straggler_detection`, pure. Start reading at `Pacing.add`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from manyhands.data.sample_order import Division
from manyhands.parallel.replicas.straggler_detection import Slow, better_parts, paces_of, slow_workers
from manyhands.spec.run import TrainSection

__all__ = ["Pacing", "Verdict"]

# By how much the slowest worker's part of a step has to become shorter for slices to move.
LEAST_GAIN = 0.1
# What was said of a slow worker is said anew when it has become so many times as slow, or less slow.
WORTH_TELLING = 1.5


class Verdict(NamedTuple):
    """What has changed with the last window."""

    slow: list[Slow]
    keeps_up: list[Slow]
    """Who was slow, as it was said then, and is not any more."""
    parts: tuple[int, ...] | None
    """How many slices each rank takes from the next step on, if that is new."""


class Pacing:
    """`division` is how slices are divided now; it changes between steps only, and starts even."""

    def __init__(self, settings: TrainSection, world_size: int) -> None:
        self._settings = settings
        self.regrouped(world_size)

    def regrouped(self, world_size: int) -> None:
        """Other workers, or others' ranks: nothing is known of them."""
        self.division = Division(world_size)
        self._told: dict[int, Slow] = {}
        self._window: list[Sequence[Sequence[float]]] = []
        self._shares: Sequence[range] = ()

    def add(self, shares: Sequence[range], slices: int, times: Sequence[Sequence[float]]) -> Verdict | None:
        """A step is done that was divided into `shares`; `times` are those of the step before.

        Only whole batches, of `slices` slices, that were divided as they are now can be compared.
        """
        before, self._shares = self._shares, shares
        if not times or not all(map(any, times)) or before != self.division.shares(slices):
            return None
        self._window.append(times)
        if len(self._window) < self._settings.straggler_steps:
            return None
        window, self._window = self._window, []
        return self._judge(window, [len(share) for share in before])

    def _judge(self, window: Sequence[Sequence[Sequence[float]]], slices: Sequence[int]) -> Verdict | None:
        paces = paces_of(window, slices)
        found = {slow.rank: slow for slow in slow_workers(paces, self._settings.straggler_factor, self._told)}
        news = [slow for slow in found.values() if _is_news(slow, self._told.get(slow.rank))]
        gone = [slow for rank, slow in self._told.items() if rank not in found]
        self._told = {rank: self._told[rank] for rank in found if rank in self._told}
        self._told |= {slow.rank: slow for slow in news}
        parts = better_parts(paces, LEAST_GAIN) if self._settings.balance else None
        if parts is not None:
            self.division = Division(len(parts), parts)
        return Verdict(news, gone, parts) if news or gone or parts else None


def _is_news(slow: Slow, told: Slow | None) -> bool:
    if told is None or slow.phase != told.phase:
        return True
    return not told.factor / WORTH_TELLING < slow.factor < told.factor * WORTH_TELLING
