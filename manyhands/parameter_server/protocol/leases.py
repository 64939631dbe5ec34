"""Which worker computes which slice under parameter servers: slices are leased, and each lease counts once. Pure.

The first server keeps the `LeaseTable` of an interval: which worker holds which slice, which leases to reissue after a
worker died, and when all workers synchronise. The table is soft state: applied updates are in server memory, workers
re-send their leases, and the rest is in the persisted `LeaseTableState`. In sync and ssp a step is applied when the
server has all of its slices, and a slice may be computed with weights that lack at most the last `ahead` of the steps
before it; so ssp(0) is sync. In async a step is computed by one worker and applied on arrival. The protocol:
docs/protocols/parameter-server.md. Start reading at `LeaseTable.ask`.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable
from typing import NamedTuple

import msgspec

from manyhands.data.sample_order import num_slices

__all__ = [
    "WINDOW",
    "Interval",
    "Item",
    "Lease",
    "LeaseGrant",
    "LeaseTable",
    "LeaseTableState",
    "Rule",
    "ServerProgress",
    "SyncPoint",
]


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of one call (`fit`) on data with numbered rows; a resumed call begins with a later step."""

    call: int
    first: int
    """Number of the first step; `last` is that of the last one."""
    last: int
    start_row: int
    """Rows of the first step's epoch that were consumed before it."""
    num_rows: int
    batch_size: int
    slices: int
    whole: bool
    """A step is computed by one worker, slice after slice."""

    def rows(self, step: int) -> int:
        return min(self.batch_size, self.num_rows - self.start(step))

    def places(self, step: int) -> int:
        """How many slices a step is cut into; none of them is empty."""
        rows = self.rows(step)
        return num_slices(rows, self.slices, short=rows < self.batch_size)

    def items(self, step: int) -> int:
        """How many leases a step is divided into."""
        return 1 if self.whole else self.places(step)

    def ends_epoch(self, step: int) -> bool:
        return self._steps_from(self.start(step)) == 1

    def next_end(self, step: int) -> int:
        """The first step from this one on after which all workers synchronise: the last of its epoch or of the call."""
        return min(self.last, step - 1 + self._steps_from(self.start(step)))

    def start(self, step: int) -> int:
        """Rows of its epoch that are consumed before a step. The first epoch may begin anywhere, all others at 0."""
        steps = step - self.first
        in_first = self._steps_from(self.start_row)
        if steps < in_first:
            return self.start_row + steps * self.batch_size
        return (steps - in_first) % self._steps_from(0) * self.batch_size

    def _steps_from(self, row: int) -> int:
        """How many steps the rest of an epoch takes."""
        return -(-(self.num_rows - row) // self.batch_size)


WINDOW = 4096
"""How far beyond the first unapplied step leases may be granted, which bounds what a server has to remember."""


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """Which slices may be leased when."""

    ahead: int | None
    """A slice of step t is computed with weights of step t - 1 - ahead or later; None: with the newest."""
    backups: int = 0
    """How many slices may be leased a second time, to idle workers; the first gradient to arrive is used."""
    alone: int = 0
    """Up to this step only one lease is granted at a time, as if there were one worker."""

    def admits(self, step: int, low: int) -> bool:
        return step <= low + (WINDOW if self.ahead is None else 1 + self.ahead)


class Item(NamedTuple):
    """What a lease is for: the slice with index `place` of a step."""

    step: int
    place: int


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """A slice that a worker computes, and where its gradient goes: buffer `row`, with the fill id `filling`.

    The fill id is unique to this lease: it distinguishes this content of the buffer from earlier and later ones.
    """

    step: int
    place: int
    row: int
    filling: int

    @property
    def item(self) -> Item:
        return Item(self.step, self.place)


class ServerProgress(NamedTuple):
    """What a server has: all steps up to `low` applied, also those in `seen`, and gradients that wait (`has`)."""

    low: int
    seen: frozenset[int] = frozenset()
    has: frozenset[Item] = frozenset()

    def applied(self, step: int) -> bool:
        return step <= self.low or step in self.seen

    def then(self, later: ServerProgress) -> ServerProgress:
        """Merges a later report: applied steps stay, even if reported late; a lost server loses waiting gradients."""
        low = max(self.low, later.low)
        return ServerProgress(low, frozenset(step for step in self.seen | later.seen if step > low), later.has)


class LeaseTableState(msgspec.Struct, frozen=True, array_like=True):
    """What a successor of the lease table cannot learn from others. Persisted before the reply to a request is sent."""

    held: int
    """The last step after which all workers have synchronised and resumed."""
    called: int
    """The step after which they synchronise now; equal to `held` when they do not."""
    why: int
    """What they synchronise for: the same value for all workers."""
    reach: int
    """The last step that was leased. Gradients of it may still arrive until all servers have applied it."""
    left: tuple[int, ...] = ()
    """Live workers that have left the interval."""

    @classmethod
    def before(cls, step: int) -> LeaseTableState:
        """For an interval that begins with this step."""
        return cls(step - 1, step - 1, 0, step - 1)


class LeaseGrant(NamedTuple):
    held: Lease
    version: int
    """All servers have applied the steps up to this one."""


class SyncPoint(NamedTuple):
    """All workers synchronise after this step: every step up to it is applied, none beyond."""

    step: int
    why: int
    """The highest of the workers' requests that arrived before this sync point was set."""


class _LeaseEntry(NamedTuple):
    worker: int
    held: Lease
    filled: bool = False


class LeaseTable:
    """The lease table of one interval. Its number is larger than that of any earlier table of the run, and below 2**32.

    In sync and ssp there must be at least one gradient buffer per slice of a step. A worker reads weights of the
    version in its grant until its gradient is complete: for that, 2 * (1 + ahead) versions must be kept.
    """

    def __init__(
        self,
        interval: Interval,
        rule: Rule,
        standings: Iterable[ServerProgress],
        *,
        num_rows: int,
        number: int,
        minutes: LeaseTableState,
    ) -> None:
        # A server's report may be old; a sync point is set only when all servers have applied the steps up to it.
        self._progress = [ServerProgress(minutes.called).then(progress) for progress in standings]
        self.interval, self.minutes, self._rule = interval, minutes, rule
        self.number, self._num_rows = number, num_rows
        self._last_fill_id = number << 32
        self._leases: dict[int, _LeaseEntry] = {}
        """By fill id."""
        self._void_buffers: dict[int, set[int]] = {}
        """Worker -> buffers that it may still be writing to, though its leases of them have ended."""
        self._reissued: list[Item] = []
        """To be leased again."""
        self._announced: dict[int, list[Item]] = {}
        """Worker -> items that were announced to it as its next ones, and are not leased yet."""
        self._next = Item(max(interval.first, self.low + 1), 0)
        self._synced: dict[int, int] = {}
        """Worker -> the last step after which it has synchronised."""
        self._tickets: dict[int, int] = {}
        """Of each worker's last request; `_answered`: of the last one that got an answer."""
        self._answered: dict[int, int] = {}
        self._unreported: set[int] = set()
        """Workers that have not reported their leases to this table yet."""
        self._live_workers: frozenset[int] | None = None
        self._sync_reason = 0
        self._boundary = (
            minutes.called if self._is_synchronising else interval.next_end(min(minutes.held + 1, interval.last))
        )

    @property
    def low(self) -> int:
        """Every server has applied all steps up to this one."""
        return min(progress.low for progress in self._progress)

    @property
    def rows_used(self) -> int:
        return len(self._used_buffers())

    def awaited(self) -> set[int]:
        """Workers that may send a gradient before the next sync point: all while steps are left, then the leaseholders.

        For intervals whose steps are leased whole. Nothing is leased before all workers have reported their leases.
        """
        leased = {lease.held.step for lease in self._leases.values()}
        left = (*(item.step for item in self._reissued), *range(self._next.step, self._boundary + 1))
        if not self._unreported and any(step not in leased and not self.has_applied(step) for step in left):
            return set(self._live_workers if self._live_workers is not None else self._synced)
        return self._unreported | {lease.worker for lease in self._leases.values() if not lease.filled}

    def expect(self, workers: Iterable[int]) -> None:
        """These may hold leases from an earlier lease table, which this one learns with their next request."""
        self._unreported = {worker for worker in workers if self._is_live(worker)}

    # ---- events ----

    def ask(
        self, worker: int, book: int, ticket: int, met: int, wish: int, holding: Collection[Lease]
    ) -> LeaseGrant | SyncPoint | None:
        """A worker requests work. None: nothing now.

        It lists every lease it holds, which this table may not know after a server was lost, and repeats its request
        for a sync point until that has happened. Tickets grow with every message, and a worker accepts only the reply
        to its last ticket: so a lease that the request does not list is not held, and no earlier reply can change
        that. This is true of one lease table: `book` is the number of the one that the worker knows, and a request
        for another one has no effect. A request that was not answered can be sent again unchanged.
        """
        if book != self.number or not self._is_live(worker) or ticket < self._tickets.get(worker, 0):
            return None
        if ticket == self._answered.get(worker):
            return None
        self._tickets[worker] = ticket
        answer = self._answer(worker, met, wish, holding)
        if answer is not None:
            self._answered[worker] = ticket
        return answer

    def _answer(self, worker: int, met: int, request: int, holding: Collection[Lease]) -> LeaseGrant | SyncPoint | None:
        self._record_leases(worker, met, holding)
        self._end_sync()
        if request:
            self._request_sync(request)
        if met < self._boundary <= self.low:
            return self._set_sync_point()
        return self._grant(worker, {held.filling for held in holding})

    def soon(self, worker: int, count: int) -> list[Item]:
        """Items that this worker will probably be leased next, so that it can read the data ahead. Not reserved."""
        mine = self._announced.setdefault(worker, [])
        while len(mine) < count and self._find_next().step <= self._boundary:
            mine.append(self._next)
            self._next = self._after(self._next)
        return list(mine)

    def filled(self, held: Lease) -> bool:
        """Whether this lease is valid and the first of its slice to be filled: then servers use its gradient."""
        lease = self._leases.get(held.filling)
        if lease is None:
            return False
        self._leases[held.filling] = lease._replace(filled=True)
        self._drop(other for other in self._leases_of(held.item) if not other.filled)
        return True

    def stands(self, server: int, standing: ServerProgress) -> None:
        """A server reports its progress. A restarted one lacks gradients: those of dead workers are leased again."""
        self._progress[server] = self._progress[server].then(standing)
        self._drop(lease for lease in self._leases.values() if self.has_applied(lease.held.step))
        self._reissue_lost()

    def lose(self, living: Collection[int]) -> None:
        """Only these workers live and get replies: other leases are reissued, unless every server has the gradient."""
        self._live_workers = frozenset(living).difference(self.minutes.left)
        self._unreported &= self._live_workers
        self._synced = {worker: met for worker, met in self._synced.items() if worker in self._live_workers}
        self._tickets = {worker: ticket for worker, ticket in self._tickets.items() if worker in self._live_workers}
        self._void_buffers = {
            worker: rows for worker, rows in self._void_buffers.items() if worker in self._live_workers
        }
        self._reissue_lost()

    def leave(self, worker: int) -> None:
        """It lives, but writes and requests nothing more: its leases are reissued, as if it were dead."""
        self.minutes = msgspec.structs.replace(self.minutes, left=tuple({*self.minutes.left, worker}))
        self.lose(self._synced if self._live_workers is None else self._live_workers)

    # ---- workers ----

    def _is_live(self, worker: int) -> bool:
        return self._live_workers is None or worker in self._live_workers

    def _record_leases(self, worker: int, met: int, holding: Collection[Lease]) -> None:
        self._unreported.discard(worker)
        self._synced[worker] = met
        for held in holding:
            # A lease from an earlier table.
            if held.filling not in self._leases and not self.has_applied(held.step) and not self._leases_of(held.item):
                self._leases[held.filling] = _LeaseEntry(worker, held)
                self._reissued = [item for item in self._reissued if item != held.item]
        self._void_buffers[worker] = {held.row for held in holding if held.filling not in self._leases}

    # ---- sync points ----

    @property
    def _is_synchronising(self) -> bool:
        return self.minutes.called > self.minutes.held

    def _request_sync(self, request: int) -> None:
        """All synchronise as soon as leased steps are applied; workers that have just done so take one step first."""
        if not self._is_synchronising:
            self._sync_reason = max(self._sync_reason, request)
            self._boundary = min(self._boundary, max(self.minutes.reach, self.low, self.minutes.held + 1))

    def _set_sync_point(self) -> SyncPoint:
        if not self._is_synchronising:
            self.minutes = msgspec.structs.replace(self.minutes, called=self._boundary, why=self._sync_reason)
        return SyncPoint(self._boundary, self.minutes.why)

    def _end_sync(self) -> None:
        """Once all workers of the sync point have resumed; after the last step none does."""
        late = any(met < self._boundary for met in self._synced.values())
        if self._is_synchronising and self._boundary < self.interval.last and not late and not self._unreported:
            self.minutes = msgspec.structs.replace(self.minutes, held=self._boundary, why=0)
            self._sync_reason = 0
            self._boundary = self.interval.next_end(self._boundary + 1)

    # ---- leases ----

    def _grant(self, worker: int, known: Collection[int]) -> LeaseGrant | None:
        for lease in self._leases.values():
            if lease.worker == worker and not lease.filled:
                # The last reply was lost, or the gradient is on its way. If a lease that the worker lists were granted
                # again, it might be done with it when the reply arrives, and fill a buffer that is no longer its own.
                return LeaseGrant(lease.held, self.low) if lease.held.filling not in known else None
        # A worker that has missed a sync point waits for the next one, while there are others that will reach it.
        if self._unreported or not max(self._synced.values()) <= self._synced[worker] < self._boundary:
            return None
        if self._leases and self.low < self._rule.alone:
            return None
        row = self._free_buffer()
        item = self._pick(worker) if row is not None else None
        if row is None or item is None:
            return None
        self._last_fill_id += 1
        held = Lease(item.step, item.place, row, self._last_fill_id)
        self._leases[held.filling] = _LeaseEntry(worker, held)
        if item.step > self.minutes.reach:
            self.minutes = msgspec.structs.replace(self.minutes, reach=item.step)
        return LeaseGrant(held, self.low)

    def _pick(self, worker: int) -> Item | None:
        """What to lease: a reissued item, one announced to it, the next, one announced to others, or a backup."""
        while self._reissued:
            item = self._reissued.pop(0)
            if not self.has_applied(item.step):
                return item
        own = [one for one in self._announced if one == worker or not self._is_live(one)]
        found_next, of_others = self._find_next(), self._first_announced(self._announced)
        # Steps that are applied in order get their buffers in order, or later steps might occupy all of them.
        first = min([found_next, *of_others]).step
        last = self._boundary if self._rule.ahead is None else min(self._boundary, first)
        for found in (*self._first_announced(own), found_next, *of_others):
            if found.step <= last and self._rule.admits(found.step, self.low):
                self._announced = {
                    one: [item for item in items if item != found] for one, items in self._announced.items()
                }
                return found
        return self._backup()

    def _first_announced(self, workers: Iterable[int]) -> list[Item]:
        return sorted(item for worker in workers for item in self._announced[worker] if not self._is_taken(item))[:1]

    def _find_next(self) -> Item:
        """The first item that is neither leased nor announced, or one beyond the boundary."""
        while self._next.step <= self._boundary and self._is_taken(self._next):
            self._next = self._after(self._next)
        return self._next

    def _is_taken(self, item: Item) -> bool:
        return self.has_applied(item.step) or bool(self._leases_of(item))

    def _backup(self) -> Item | None:
        """The first slice that has one lease only, and no gradient yet."""
        leased = [lease.held.item for lease in self._leases.values()]
        twice = {item for item in leased if leased.count(item) > 1}
        slow = [one.held.item for one in self._leases.values() if not one.filled and one.held.item not in twice]
        return min(slow, default=None) if len(twice) < self._rule.backups else None

    def _after(self, item: Item) -> Item:
        last = item.place + 1 >= self.interval.items(item.step)
        return Item(item.step + 1, 0) if last else Item(item.step, item.place + 1)

    def _used_buffers(self) -> set[int]:
        return {lease.held.row for lease in self._leases.values()}.union(*self._void_buffers.values())

    def _free_buffer(self) -> int | None:
        used = self._used_buffers()
        return next((row for row in range(self._num_rows) if row not in used), None)

    def _leases_of(self, item: Item) -> list[_LeaseEntry]:
        return [lease for lease in self._leases.values() if lease.held.item == item]

    def _drop(self, leases: Iterable[_LeaseEntry]) -> None:
        """Ends leases that are no longer needed. Their buffers are free, except where a live worker may be writing."""
        for lease in list(leases):
            del self._leases[lease.held.filling]
            if not lease.filled and self._is_live(lease.worker):
                self._void_buffers.setdefault(lease.worker, set()).add(lease.held.row)

    def _reissue_lost(self) -> None:
        """Reissues leases of dead workers, where a server lacks the gradient."""
        for lease in [one for one in self._leases.values() if not self._is_live(one.worker)]:
            if not (lease.filled and self._is_on_all_servers(lease.held.item)):
                del self._leases[lease.held.filling]
                if not self._leases_of(lease.held.item):
                    bisect.insort(self._reissued, lease.held.item)

    def has_applied(self, step: int) -> bool:
        """Whether every server has."""
        return all(progress.applied(step) for progress in self._progress)

    def _is_on_all_servers(self, item: Item) -> bool:
        return all(one.applied(item.step) or item in one.has for one in self._progress)
