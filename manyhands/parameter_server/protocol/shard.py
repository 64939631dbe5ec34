"""What one server has applied, and which gradients wait: each slice of each step counts once. Pure.

Gradients are in buffers in memory; a `SliceGradient` says in which, and with which fill id. In sync and ssp a step is
due when all of its slices have arrived and the step before it is applied; in async each is due at once. A gradient for
an applied step changes nothing, no matter which worker sends it or how often. Start reading at `Shard.fill`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from manyhands.parameter_server.protocol.leases import WINDOW, Interval, Item, ServerProgress

__all__ = ["Shard", "SliceGradient"]


class SliceGradient(NamedTuple):
    """The gradient of one slice (in async, of a whole step) and the facts that the worker reported with it."""

    step: int
    place: int
    row: int
    filling: int
    worker: int
    based_on: int
    """The version of the weights that it was computed with."""
    total: float
    """The sum of its losses; `weight`: the sum of their weights."""
    weight: float
    absent: tuple[int, ...]
    """Parameters that have no gradient."""
    changes: bytes
    tables: tuple[str, ...] = ()
    """Embedding tables that it has gradients for, on any server."""

    @property
    def item(self) -> Item:
        return Item(self.step, self.place)


class Shard:
    """One server's record: all steps up to `low` are applied, and those in `seen` beyond it."""

    def __init__(self, interval: Interval, *, in_order: bool, low: int, seen: Collection[int] = ()) -> None:
        self.interval, self.in_order, self.low, self.seen = interval, in_order, low, frozenset(seen)
        self.first: int | None = None
        """A step that must be applied before any other."""
        self._waiting: dict[int, dict[int, SliceGradient]] = {}

    @property
    def num_applied(self) -> int:
        """Updates since the beginning of the run."""
        return self.low + len(self.seen)

    @property
    def waiting(self) -> list[SliceGradient]:
        """Gradients that have arrived and are not applied."""
        return [one for places in self._waiting.values() for one in places.values()]

    def is_applied(self, step: int) -> bool:
        return step <= self.low or step in self.seen

    def fill(self, contribution: SliceGradient) -> bool:
        """Whether it is kept; if not, it was applied, has already arrived or belongs to another interval.

        Of two gradients of one slice that with the higher fill id is kept: the buffer of the other one may be reused.
        """
        step, place = contribution.step, contribution.place
        known = self.interval.first <= step <= min(self.interval.last, self.low + WINDOW)
        if not known or self.is_applied(step) or not 0 <= place < self.interval.items(step):
            return False
        before = self._waiting.get(step, {}).get(place)
        if before is not None and before.filling >= contribution.filling:
            return False
        self._waiting.setdefault(step, {})[place] = contribution
        return True

    def due(self) -> list[SliceGradient] | None:
        """The gradients of the next step to apply, in the order of their slices; None while some are missing."""
        begun = [self.first] if self.first is not None else None
        for step in begun or ([self.low + 1] if self.in_order else self._waiting):
            waiting = self._waiting.get(step, {})
            if waiting and len(waiting) == self.interval.items(step):
                return [waiting[place] for place in sorted(waiting)]
        return None

    def drop(self, contribution: SliceGradient) -> None:
        """Its buffer now has other content: another gradient will arrive for its slice."""
        waiting = self._waiting.get(contribution.step, {})
        if waiting.get(contribution.place) == contribution:
            del waiting[contribution.place]

    def after(self, step: int) -> tuple[int, frozenset[int]]:
        """`low` and `seen` once this step is applied: to be committed together with the new weights."""
        low, seen = self.low, self.seen | {step}
        while low + 1 in seen:
            low += 1
        return low, frozenset(one for one in seen if one > low)

    def applied(self, step: int) -> None:
        """The new weights of this step are committed, and `after` with them."""
        self._waiting.pop(step, None)
        self.first = None
        self.low, self.seen = self.after(step)

    def standing(self) -> ServerProgress:
        has = frozenset(Item(step, place) for step, places in self._waiting.items() for place in places)
        return ServerProgress(self.low, self.seen, has)
