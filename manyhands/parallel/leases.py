"""Who computes what under parameter servers: slices of steps are leased, and a lease is what counts once. Pure.

A `Course` is the steps of one call, as arithmetic. The `Book` is kept by the first server: who has which slice, which
ones to hand out again because whoever had them is gone, and when all meet. It can be lost and written anew at any time:
what has been applied is in the servers' own memory, and workers say again what they hold. In sync and ssp a step is
applied when all of its slices are there, and a slice may be computed with weights that lack at most the last
`staleness` of the steps before it; so ssp(0) is sync. In async a step is computed by one worker, and is applied on
arrival. Start reading at `Book.ask`.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable
from typing import NamedTuple

import msgspec

from manyhands.data.order import num_slices

__all__ = ["WINDOW", "Book", "Course", "Grant", "Held", "Item", "Meet", "Rule", "Standing"]

WINDOW = 4096
"""How many steps beyond the first that is not applied may be handed out: what a server remembers is bounded by it."""


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of one call over rows by number, from wherever it began."""

    call: int
    first: int
    """Number of the first step, and below, of the last."""
    last: int
    start_row: int
    """Rows of the first step's epoch that were consumed before it."""
    num_rows: int
    batch_size: int
    slices: int
    whole: bool
    """A step is computed by one worker, all its slices one after the other."""

    def rows(self, step: int) -> int:
        return min(self.batch_size, self.num_rows - self._start(step))

    def places(self, step: int) -> int:
        """How many slices a step is cut into; none of them is empty."""
        rows = self.rows(step)
        return num_slices(rows, self.slices, short=rows < self.batch_size)

    def items(self, step: int) -> int:
        """In how many pieces a step is handed out."""
        return 1 if self.whole else self.places(step)

    def ends_epoch(self, step: int) -> bool:
        return self._start(step) + self.rows(step) == self.num_rows

    def next_end(self, step: int) -> int:
        """The first step from this one on after which all meet: an epoch's last, or the call's."""
        per_epoch = -(-self.num_rows // self.batch_size)
        return min(self.last, step + per_epoch - 1 - self._start(step) // self.batch_size)

    def _start(self, step: int) -> int:
        per_epoch = -(-self.num_rows // self.batch_size)
        return (self.start_row // self.batch_size + step - self.first) % per_epoch * self.batch_size


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """What may be handed out when."""

    ahead: int | None
    """A slice of step t is computed with weights of step t - 1 - ahead or later; None: with whatever there is."""

    def admits(self, step: int, low: int) -> bool:
        return step <= low + (WINDOW if self.ahead is None else 1 + self.ahead)


class Item(NamedTuple):
    step: int
    place: int


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A slice that a worker has, and where its gradient goes: a row of memory, and the number of this filling of it."""

    step: int
    place: int
    row: int
    filling: int

    @property
    def item(self) -> Item:
        return Item(self.step, self.place)


class Standing(NamedTuple):
    """What a server has: all steps to `low`, those in `seen` beyond it, and gradients of those in `has`."""

    low: int
    seen: frozenset[int] = frozenset()
    has: frozenset[Item] = frozenset()

    def applied(self, step: int) -> bool:
        return step <= self.low or step in self.seen


class Grant(NamedTuple):
    held: Held
    version: int
    """All servers have applied the steps to this one."""


class Meet(NamedTuple):
    """Everybody meets after this step; all steps to it are applied, none beyond."""

    step: int
    why: int
    """The largest of what workers wished for."""


class _Lease(NamedTuple):
    worker: int
    held: Held
    filled: bool


class Book:
    """Of one course. `fillings` numbers fillings of rows from there on: no two books of a run may give the same."""

    def __init__(
        self, course: Course, rule: Rule, standings: Iterable[Standing], *, num_rows: int, fillings: int, met: int
    ) -> None:
        self.course, self._rule, self._standings = course, rule, list(standings)
        self._fillings, self._num_rows = fillings, num_rows
        self._leases: dict[Item, _Lease] = {}
        self._doomed: dict[int, int] = {}
        """Row -> worker, of leases that are void while somebody may still write there."""
        self._again: list[Item] = []
        self._next = Item(max(course.first, self.low + 1), 0)
        self._met: dict[int, int] = {}
        self._last_met, self._why = met, 0
        self._boundary = course.next_end(met + 1) if met < course.last else course.last
        self._missing: set[int] = set()

    @property
    def low(self) -> int:
        """Every server has applied all steps to this one."""
        return min(standing.low for standing in self._standings)

    @property
    def workers(self) -> list[int]:
        return list(self._met)

    def expect(self, workers: Iterable[int]) -> None:
        """These have leases that this book, which another one preceded, knows nothing of until they ask."""
        self._missing = set(workers)

    # ---- what happens ----

    def ask(self, worker: int, met: int, wish: int, holding: Collection[Held]) -> Grant | Meet | None:
        """A worker wants work. It says what it holds, which may be news after a server was lost. None: not now."""
        self._missing.discard(worker)
        self._met[worker] = max(met, self._met.get(worker, met))
        for held in holding:
            self._take_note(worker, held)
        if wish:
            self._call_meeting(wish)
        while self._last_met < self._boundary <= self._met[worker] and self._end_meeting():
            pass  # a book that was written anew finds several behind it
        if self._met[worker] < self._boundary and self._is_quiet():
            return Meet(self._boundary, self._why)
        return self._grant(worker)

    def filled(self, worker: int, held: Held) -> bool:
        """Whether this is the filling that was leased: then its gradient is wanted."""
        lease = self._leases.get(held.item)
        if self._is_applied(held.step) or lease is None or lease.held.filling != held.filling:
            if self._doomed.get(held.row) == worker:
                del self._doomed[held.row]
            return False
        self._leases[held.item] = lease._replace(filled=True)
        return True

    def stands(self, server: int, standing: Standing) -> None:
        """Where a server stands. One that was lost has fewer gradients than before: those of the dead are redone."""
        self._standings[server] = standing
        for item in [item for item in self._leases if self._is_applied(item.step)]:
            del self._leases[item]

    def lose(self, living: Collection[int]) -> None:
        """Only these are still there: what the others had is handed out again, unless every server has it already."""
        self._missing &= set(living)
        self._met = {worker: met for worker, met in self._met.items() if worker in living}
        self._doomed = {row: worker for row, worker in self._doomed.items() if worker in living}
        for item, lease in list(self._leases.items()):
            if lease.worker not in living and not (lease.filled and self._is_everywhere(item)):
                del self._leases[item]
                bisect.insort(self._again, item)

    # ---- meetings ----

    def _call_meeting(self, wish: int) -> None:
        """As soon as what is handed out is applied."""
        self._why = max(self._why, wish)
        handed_out = max([self._next.step - (self._next.place == 0), *(item.step for item in self._leases)])
        self._boundary = min(self._boundary, max(handed_out, self.low, self._last_met))

    def _is_quiet(self) -> bool:
        return self.low >= self._boundary and not self._leases and not self._missing

    def _end_meeting(self) -> bool:
        """Once all who were there have come back; after the last one nobody does."""
        if self._boundary == self.course.last or any(met < self._boundary for met in self._met.values()):
            return False
        self._last_met, self._why = self._boundary, 0
        self._boundary = self.course.next_end(self._boundary + 1)
        return True

    # ---- leases ----

    def _grant(self, worker: int) -> Grant | None:
        mine = next((one.held for one in self._leases.values() if one.worker == worker and not one.filled), None)
        if mine is not None:  # the answer before was lost
            return Grant(mine, self.low)
        if self._missing or self._met[worker] < self._last_met or self._met[worker] >= self._boundary:
            return None
        item = self._pick()
        row = self._free_row()
        if item is None or row is None or not self._rule.admits(item.step, self.low):
            return None
        if self._again and item == self._again[0]:
            del self._again[0]
        else:
            self._next = self._after(item)
        self._fillings += 1
        held = Held(item.step, item.place, row, self._fillings)
        self._leases[item] = _Lease(worker, held, filled=False)
        return Grant(held, self.low)

    def _pick(self) -> Item | None:
        self._again = [item for item in self._again if not self._is_applied(item.step)]
        if self._again:
            return self._again[0]
        while self._is_applied(self._next.step) or self._next in self._leases:
            self._next = self._after(self._next)
        return self._next if self._next.step <= self._boundary else None

    def _after(self, item: Item) -> Item:
        last = item.place + 1 >= self.course.items(item.step) if item.step <= self.course.last else True
        return Item(item.step + 1, 0) if last else Item(item.step, item.place + 1)

    def _free_row(self) -> int | None:
        used = {lease.held.row for lease in self._leases.values()} | self._doomed.keys()
        return next((row for row in range(self._num_rows) if row not in used), None)

    def _take_note(self, worker: int, held: Held) -> None:
        """A lease of the book before, or one that this book has taken back."""
        lease = self._leases.get(held.item)
        if lease is not None and lease.held.filling == held.filling:
            return
        if lease is None and not self._is_applied(held.step) and held.item not in self._again:
            self._leases[held.item] = _Lease(worker, held, filled=False)
        else:
            self._doomed[held.row] = worker

    def _is_applied(self, step: int) -> bool:
        return all(standing.applied(step) for standing in self._standings)

    def _is_everywhere(self, item: Item) -> bool:
        return all(one.applied(item.step) or item in one.has for one in self._standings)
