"""Who computes what under parameter servers: slices of steps are leased, and a lease is what counts once. Pure.

The `Book` of a course is kept by the first server: who has which slice, which ones to hand out again because whoever
had them is gone, and when all meet. It can be lost and written anew at any time: what has been applied is in the
servers' own memory, workers say again what they hold, and what nobody could say again is in its `Minutes`. In sync and
ssp a step is applied when all of its slices are there, and a slice may be computed with weights that lack at most the
last `ahead` of the steps before it; so ssp(0) is sync. In async a step is computed by one worker, and is applied on
arrival. The protocol: docs/protocols/parameter-server.md. Start reading at `Book.ask`.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable
from typing import NamedTuple

import msgspec

from manyhands.parameter_server.protocol.interval import Course

__all__ = ["WINDOW", "Book", "Grant", "Held", "Item", "Meet", "Minutes", "Rule", "Standing"]

WINDOW = 4096
"""How many steps beyond the first that is not applied may be handed out: what a server remembers is bounded by it."""


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """What may be handed out when."""

    ahead: int | None
    """A slice of step t is computed with weights of step t - 1 - ahead or later; None: with whatever there is."""
    backups: int = 0
    """How many slices may be handed out a second time to workers with nothing else to do; the first to fill wins."""
    alone: int = 0
    """To this step, one is handed out at a time, as if there were one worker."""

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

    def then(self, later: Standing) -> Standing:
        """What was applied stays so, even if word of it comes late; gradients that wait are lost with their server."""
        low = max(self.low, later.low)
        return Standing(low, frozenset(step for step in self.seen | later.seen if step > low), later.has)


class Minutes(msgspec.Struct, frozen=True, array_like=True):
    """What the next book must know, and nobody else could tell it. To be kept before the answer to an ask goes out."""

    held: int
    """The last step after which all have met, and have come back."""
    called: int
    """The step after which all meet now; `held` while nobody does."""
    why: int
    """What that meeting is for: the same for everybody."""
    reach: int
    """The last step that was handed out. A gradient of it may turn up as long as it is not applied everywhere."""
    left: tuple[int, ...] = ()
    """Workers that live, and take no further part."""

    @classmethod
    def before(cls, step: int) -> Minutes:
        """Of a course that begins with this step."""
        return cls(step - 1, step - 1, 0, step - 1)


class Grant(NamedTuple):
    held: Held
    version: int
    """All servers have applied the steps to this one."""


class Meet(NamedTuple):
    """Everybody meets after this step; all steps to it are applied, none beyond."""

    step: int
    why: int
    """The largest of what workers wished for before the meeting was called."""


class _Lease(NamedTuple):
    worker: int
    held: Held
    filled: bool = False


class Book:
    """Of one course. Its number is larger than that of any book before it in the run, and below 2**32.

    In sync and ssp there must be a row for every slice of a step at least. A worker reads weights of the version that
    it was granted until its gradient is filled: for that, 2 * (1 + ahead) versions must be kept.
    """

    def __init__(
        self, course: Course, rule: Rule, standings: Iterable[Standing], *, num_rows: int, number: int, minutes: Minutes
    ) -> None:
        # A server's word may be old; that a meeting was called means that all had applied the steps to it.
        self._standings = [Standing(minutes.called).then(standing) for standing in standings]
        self.course, self.minutes, self._rule = course, minutes, rule
        self.number, self._num_rows = number, num_rows
        self._fillings = number << 32
        self._leases: dict[int, _Lease] = {}
        """By number of the filling."""
        self._void: dict[int, set[int]] = {}
        """Worker -> rows that it may still write to, though its leases of them are no more."""
        self._again: list[Item] = []
        self._soon: dict[int, list[Item]] = {}
        """Worker -> what it was told to expect, and nobody was leased so far."""
        self._next = Item(max(course.first, self.low + 1), 0)
        self._met: dict[int, int] = {}
        self._tickets: dict[int, int] = {}
        """Of each worker's last ask, and of the last that was answered."""
        self._answered: dict[int, int] = {}
        self._missing: set[int] = set()
        self._living: frozenset[int] | None = None
        self._why = 0
        self._boundary = minutes.called if self._is_meeting else course.next_end(min(minutes.held + 1, course.last))

    @property
    def low(self) -> int:
        """Every server has applied all steps to this one."""
        return min(standing.low for standing in self._standings)

    @property
    def rows_used(self) -> int:
        return len(self._used_rows())

    def awaited(self) -> set[int]:
        """Who may fill something before the next meeting: everybody while steps are left to hand out, then who has one.

        For courses whose steps are handed out whole. Before all have said what they hold, nothing is handed out.
        """
        leased = {lease.held.step for lease in self._leases.values()}
        left = (*(item.step for item in self._again), *range(self._next.step, self._boundary + 1))
        if not self._missing and any(step not in leased and not self.has_applied(step) for step in left):
            return set(self._living if self._living is not None else self._met)
        return self._missing | {lease.worker for lease in self._leases.values() if not lease.filled}

    def expect(self, workers: Iterable[int]) -> None:
        """These may have leases that this book, which another one preceded, knows nothing of until they ask."""
        self._missing = {worker for worker in workers if self._lives(worker)}

    # ---- what happens ----

    def ask(
        self, worker: int, book: int, ticket: int, met: int, wish: int, holding: Collection[Held]
    ) -> Grant | Meet | None:
        """A worker wants work. None: not now.

        It says all that it holds, which may be news after a server was lost; and its wish for a meeting with every ask
        until it has met. Tickets grow with every sending, and a worker takes no answer but that to its last one: so
        what an ask does not name, the worker does not hold, and never will by an earlier answer. That is true of one
        book: `book` is the number of that which the worker has heard last, and an ask for another one says nothing.
        An ask that was not answered can be put again, as it is.
        """
        if book != self.number or not self._lives(worker) or ticket < self._tickets.get(worker, 0):
            return None
        if ticket == self._answered.get(worker):
            return None
        self._tickets[worker] = ticket
        answer = self._answer(worker, met, wish, holding)
        if answer is not None:
            self._answered[worker] = ticket
        return answer

    def _answer(self, worker: int, met: int, wish: int, holding: Collection[Held]) -> Grant | Meet | None:
        self._hear(worker, met, holding)
        self._end_meeting()
        if wish:
            self._wish(wish)
        if met < self._boundary <= self.low:
            return self._call_meeting()
        return self._grant(worker, {held.filling for held in holding})

    def soon(self, worker: int, count: int) -> list[Item]:
        """What it will probably be leased next, so that it can read the rows ahead; others get it if need be."""
        mine = self._soon.setdefault(worker, [])
        while len(mine) < count and self._find_next().step <= self._boundary:
            mine.append(self._next)
            self._next = self._after(self._next)
        return list(mine)

    def filled(self, held: Held) -> bool:
        """Whether this filling is leased, and the first of its slice: then its gradient is wanted."""
        lease = self._leases.get(held.filling)
        if lease is None:
            return False
        self._leases[held.filling] = lease._replace(filled=True)
        self._drop(other for other in self._of(held.item) if not other.filled)
        return True

    def stands(self, server: int, standing: Standing) -> None:
        """Where a server stands. One that was lost has fewer gradients than before: those of the dead are redone."""
        self._standings[server] = self._standings[server].then(standing)
        self._drop(lease for lease in self._leases.values() if self.has_applied(lease.held.step))
        self._take_back()

    def lose(self, living: Collection[int]) -> None:
        """Only these are there, and are answered: what others had is handed out again, unless every server has it."""
        self._living = frozenset(living).difference(self.minutes.left)
        self._missing &= self._living
        self._met = {worker: met for worker, met in self._met.items() if worker in self._living}
        self._tickets = {worker: ticket for worker, ticket in self._tickets.items() if worker in self._living}
        self._void = {worker: rows for worker, rows in self._void.items() if worker in self._living}
        self._take_back()

    def leave(self, worker: int) -> None:
        """It lives, but writes and asks for nothing more: what it had is handed out again, as if it were dead."""
        self.minutes = msgspec.structs.replace(self.minutes, left=tuple({*self.minutes.left, worker}))
        self.lose(self._met if self._living is None else self._living)

    # ---- workers ----

    def _lives(self, worker: int) -> bool:
        return self._living is None or worker in self._living

    def _hear(self, worker: int, met: int, holding: Collection[Held]) -> None:
        self._missing.discard(worker)
        self._met[worker] = met
        for held in holding:
            # Of the book before.
            if held.filling not in self._leases and not self.has_applied(held.step) and not self._of(held.item):
                self._leases[held.filling] = _Lease(worker, held)
                self._again = [item for item in self._again if item != held.item]
        self._void[worker] = {held.row for held in holding if held.filling not in self._leases}

    # ---- meetings ----

    @property
    def _is_meeting(self) -> bool:
        return self.minutes.called > self.minutes.held

    def _wish(self, wish: int) -> None:
        """All meet as soon as what is handed out is applied; those who have just met, after one more step."""
        if not self._is_meeting:
            self._why = max(self._why, wish)
            self._boundary = min(self._boundary, max(self.minutes.reach, self.low, self.minutes.held + 1))

    def _call_meeting(self) -> Meet:
        if not self._is_meeting:
            self.minutes = msgspec.structs.replace(self.minutes, called=self._boundary, why=self._why)
        return Meet(self._boundary, self.minutes.why)

    def _end_meeting(self) -> None:
        """Once all who were there have come back; after the last one nobody does."""
        late = any(met < self._boundary for met in self._met.values())
        if self._is_meeting and self._boundary < self.course.last and not late and not self._missing:
            self.minutes = msgspec.structs.replace(self.minutes, held=self._boundary, why=0)
            self._why = 0
            self._boundary = self.course.next_end(self._boundary + 1)

    # ---- leases ----

    def _grant(self, worker: int, known: Collection[int]) -> Grant | None:
        for lease in self._leases.values():
            if lease.worker == worker and not lease.filled:
                # The answer before was lost; or word of the filling is on its way. Whoever were granted then what it
                # holds might be done with it when the answer comes, and would fill a row that is no longer its own.
                return Grant(lease.held, self.low) if lease.held.filling not in known else None
        # Whoever has missed a meeting waits for the next one, while there are others to bring it about.
        if self._missing or not max(self._met.values()) <= self._met[worker] < self._boundary:
            return None
        if self._leases and self.low < self._rule.alone:
            return None
        row = self._free_row()
        item = self._pick(worker) if row is not None else None
        if row is None or item is None:
            return None
        self._fillings += 1
        held = Held(item.step, item.place, row, self._fillings)
        self._leases[held.filling] = _Lease(worker, held)
        if item.step > self.minutes.reach:
            self.minutes = msgspec.structs.replace(self.minutes, reach=item.step)
        return Grant(held, self.low)

    def _pick(self, worker: int) -> Item | None:
        """What to hand out: what was taken back, what it expects, the next, what others expect, or are slow with."""
        while self._again:
            item = self._again.pop(0)
            if not self.has_applied(item.step):
                return item
        own = [one for one in self._soon if one == worker or not self._lives(one)]
        found_next, of_others = self._find_next(), self._expected(self._soon)
        # Steps that are applied in order get their rows in order, or later ones might have all of them.
        first = min([found_next, *of_others]).step
        last = self._boundary if self._rule.ahead is None else min(self._boundary, first)
        for found in (*self._expected(own), found_next, *of_others):
            if found.step <= last and self._rule.admits(found.step, self.low):
                self._soon = {one: [item for item in items if item != found] for one, items in self._soon.items()}
                return found
        return self._second()

    def _expected(self, workers: Iterable[int]) -> list[Item]:
        return sorted(item for worker in workers for item in self._soon[worker] if not self._is_taken(item))[:1]

    def _find_next(self) -> Item:
        """The first that nobody has and nobody expects; or one beyond the boundary."""
        while self._next.step <= self._boundary and self._is_taken(self._next):
            self._next = self._after(self._next)
        return self._next

    def _is_taken(self, item: Item) -> bool:
        return self.has_applied(item.step) or bool(self._of(item))

    def _second(self) -> Item | None:
        """The first slice that somebody has, is not done with, and nobody else has."""
        leased = [lease.held.item for lease in self._leases.values()]
        twice = {item for item in leased if leased.count(item) > 1}
        slow = [one.held.item for one in self._leases.values() if not one.filled and one.held.item not in twice]
        return min(slow, default=None) if len(twice) < self._rule.backups else None

    def _after(self, item: Item) -> Item:
        last = item.place + 1 >= self.course.items(item.step)
        return Item(item.step + 1, 0) if last else Item(item.step, item.place + 1)

    def _used_rows(self) -> set[int]:
        return {lease.held.row for lease in self._leases.values()}.union(*self._void.values())

    def _free_row(self) -> int | None:
        used = self._used_rows()
        return next((row for row in range(self._num_rows) if row not in used), None)

    def _of(self, item: Item) -> list[_Lease]:
        return [lease for lease in self._leases.values() if lease.held.item == item]

    def _drop(self, leases: Iterable[_Lease]) -> None:
        """Nobody needs them. Their rows are free, except where somebody may be writing."""
        for lease in list(leases):
            del self._leases[lease.held.filling]
            if not lease.filled and self._lives(lease.worker):
                self._void.setdefault(lease.worker, set()).add(lease.held.row)

    def _take_back(self) -> None:
        """What the dead had, and not every server has got."""
        for lease in [one for one in self._leases.values() if not self._lives(one.worker)]:
            if not (lease.filled and self._is_everywhere(lease.held.item)):
                del self._leases[lease.held.filling]
                if not self._of(lease.held.item):
                    bisect.insort(self._again, lease.held.item)

    def has_applied(self, step: int) -> bool:
        """Whether every server has."""
        return all(standing.applied(step) for standing in self._standings)

    def _is_everywhere(self, item: Item) -> bool:
        return all(one.applied(item.step) or item in one.has for one in self._standings)
