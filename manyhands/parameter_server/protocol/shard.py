"""What one server has applied, and what it waits for: each slice of each step counts once. Pure.

Gradients lie in rows of memory; a `Contribution` says where, and with which filling of that row. In sync and ssp a step
is due when all of its slices are there and the step before it is applied; in async each is due at once. A contribution
to a step that was applied changes nothing, whoever sends it and how often. Start reading at `Shard.fill`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from manyhands.parameter_server.protocol.interval import Course
from manyhands.parameter_server.protocol.leases import WINDOW, Item, Standing

__all__ = ["Contribution", "Shard"]


class Contribution(NamedTuple):
    """The gradient of one slice (of a whole step, in async), and what it says of itself."""

    step: int
    place: int
    row: int
    filling: int
    worker: int
    based_on: int
    """The version of the weights that it was computed with."""
    total: float
    """The sum of its losses, and below, their weight."""
    weight: float
    absent: tuple[int, ...]
    """Parameters without a gradient in it."""
    changes: bytes
    tables: tuple[str, ...] = ()
    """Tables of rows that it has gradients for, this server's or others'."""

    @property
    def item(self) -> Item:
        return Item(self.step, self.place)


class Shard:
    """All steps to `low` are applied, and those in `seen` beyond it."""

    def __init__(self, course: Course, *, in_order: bool, low: int, seen: Collection[int] = ()) -> None:
        self.course, self.in_order, self.low, self.seen = course, in_order, low, frozenset(seen)
        self.first: int | None = None
        """A step that must be applied before any other."""
        self._waiting: dict[int, dict[int, Contribution]] = {}

    @property
    def num_applied(self) -> int:
        """Updates since the beginning of the run."""
        return self.low + len(self.seen)

    @property
    def waiting(self) -> list[Contribution]:
        """All that are here and not applied."""
        return [one for places in self._waiting.values() for one in places.values()]

    def is_applied(self, step: int) -> bool:
        return step <= self.low or step in self.seen

    def fill(self, contribution: Contribution) -> bool:
        """Whether it is kept; one that is not has been applied, is there already or belongs to another course.

        Of two fillings of one slice the later is kept: the row of the earlier one may be in other hands.
        """
        step, place = contribution.step, contribution.place
        known = self.course.first <= step <= min(self.course.last, self.low + WINDOW)
        if not known or self.is_applied(step) or not 0 <= place < self.course.items(step):
            return False
        before = self._waiting.get(step, {}).get(place)
        if before is not None and before.filling >= contribution.filling:
            return False
        self._waiting.setdefault(step, {})[place] = contribution
        return True

    def due(self) -> list[Contribution] | None:
        """The contributions to the next step to apply, in the order of their slices; None while some are missing."""
        begun = [self.first] if self.first is not None else None
        for step in begun or ([self.low + 1] if self.in_order else self._waiting):
            waiting = self._waiting.get(step, {})
            if waiting and len(waiting) == self.course.items(step):
                return [waiting[place] for place in sorted(waiting)]
        return None

    def drop(self, contribution: Contribution) -> None:
        """Its row has been filled with something else: another one will come for its slice."""
        waiting = self._waiting.get(contribution.step, {})
        if waiting.get(contribution.place) == contribution:
            del waiting[contribution.place]

    def after(self, step: int) -> tuple[int, frozenset[int]]:
        """`low` and `seen` once this step is applied: to be committed together with what it makes of the weights."""
        low, seen = self.low, self.seen | {step}
        while low + 1 in seen:
            low += 1
        return low, frozenset(one for one in seen if one > low)

    def applied(self, step: int) -> None:
        """What it made of the weights is committed, and `after` with it."""
        self._waiting.pop(step, None)
        self.first = None
        self.low, self.seen = self.after(step)

    def standing(self) -> Standing:
        has = frozenset(Item(step, place) for step, places in self._waiting.items() for place in places)
        return Standing(self.low, self.seen, has)
