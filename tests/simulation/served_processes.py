"""Simulated workers and servers around the real `LeaseTable` and `Shard` (docs/protocols/parameter-server.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from manyhands.parameter_server.protocol.leases import (
    Lease,
    LeaseGrant,
    LeaseTable,
    LeaseTableState,
    ServerProgress,
    SyncPoint,
)
from manyhands.parameter_server.protocol.shard import Shard, SliceGradient

from .served_history import Committed, Content, Granted, Left, Met, Part, Started

if TYPE_CHECKING:
    from .served_world import World

ASK_EVERY_S = 0.1
REPORT_EVERY_S = 0.2


class Forgetful(Shard):
    """A defect: it does not know what it has applied."""

    def is_applied(self, step: int) -> bool:
        return False


class Memory:
    """What survives a server: committed all at once, or not at all. Weights are a ring of copies."""

    def __init__(self, world: World) -> None:
        self.low, self.seen = world.interval.first - 1, frozenset[int]()
        self.table_state = LeaseTableState.before(world.interval.first)
        self.copies = [self.low] * (2 if world.ahead is None else 2 * (1 + world.ahead))

    def begin_copy(self, version: int) -> None:
        self.copies[version % len(self.copies)] = version

    def has_copy(self, version: int) -> bool:
        return self.copies[version % len(self.copies)] == version


class Row:
    """Gradients in memory that all share. What two write at once is neither's."""

    def __init__(self) -> None:
        self.filling, self.content, self.changes = 0, None, 0
        self._writing: set[int] = set()
        self._spoiled: set[int] = set()

    def begin(self, filling: int) -> None:
        self.filling, self.content = filling, None
        self.changes += 1
        self._writing.add(filling)
        if len(self._writing) > 1:
            self._spoiled |= self._writing

    def end(self, content: Content) -> None:
        self.changes += 1
        self._writing.discard(content.held.filling)
        self.content = None if content.held.filling in self._spoiled else content

    def leave(self, filling: int) -> None:
        self._writing.discard(filling)


class Server:
    def __init__(self, world: World, number: int, incarnation: int) -> None:
        self._world, self.number, self.incarnation, self.alive = world, number, incarnation, True
        self._memory = world.memories[number]
        kind = Shard if world.defects.deduplication else Forgetful
        self.shard = kind(
            world.interval, in_order=world.ahead is not None, low=self._memory.low, seen=self._memory.seen
        )
        self.table: LeaseTable | None = None
        self._progress: dict[int, ServerProgress] = {number: self.shard.standing()}
        self._living: tuple[int, ...] = ()
        self._received = 0
        self._busy = False
        world.note(Started(world.now, number, self._memory.low, self._memory.seen))
        self._later(0.0, self._every_while)

    def _later(self, delay_s: float, action) -> None:
        self._world.at(delay_s, lambda: self.alive and action())

    def _every_while(self) -> None:
        self._report()
        self._later(REPORT_EVERY_S, self._every_while)

    def _report(self) -> None:
        number, progress = self.number, self.shard.standing()
        if number == 0:
            self.take_progress(0, progress)
        else:
            self._world.send("server 0", lambda first: first.take_progress(number, progress))

    # ---- gradients ----

    def fill(self, contribution: SliceGradient, held: Lease) -> None:
        if self.table is not None:
            self.table.filled(held)
        if not self.shard.fill(contribution) and self.shard.is_applied(held.step):
            self._acknowledge(contribution)
        self._world.history.waiting = max(self._world.history.waiting, len(self.shard.standing().has))
        self._work()

    def _acknowledge(self, contribution: SliceGradient) -> None:
        number, step = self.number, contribution.step
        self._world.send(f"worker {contribution.worker}", lambda worker: worker.applied(number, step))

    def _work(self) -> None:
        due = None if self._busy else self.shard.due()
        if due is None:
            return
        self._busy = True
        world, rows = self._world, self._world.rows
        if world.defects.fillings and not self._are_intact(due):
            return
        self._memory.begin_copy(self._memory.low + 1)
        before = [rows[one.row].changes for one in due]
        self._later(world.random.random() * world.random.choice([0.02, 0.02, 0.3]), lambda: self._finish(due, before))

    def _are_intact(self, due: list[SliceGradient]) -> bool:
        gone = [one for one in due if self._world.rows[one.row].filling != one.filling]
        for one in gone:
            self._world.history.dropped += 1
            self.shard.drop(one)
        if gone:
            self._busy = False
            self._report()
            self._work()
        return not gone

    def _finish(self, due: list[SliceGradient], before: list[int]) -> None:
        """Gradients have been read: only now is it sure that they were what they should have been."""
        if self._world.defects.fillings and not self._are_intact(due):
            return
        rows, step, parts = self._world.rows, due[0].step, []
        for one, changes in zip(due, before, strict=True):
            row = rows[one.row]
            found = row.content if row.changes == changes else None
            parts.append(Part(Lease(one.step, one.place, one.row, one.filling), found))
        low, seen = self.shard.after(step)
        self._memory.low, self._memory.seen = low, seen
        self._world.note(Committed(self._world.now, self.number, step, tuple(parts), low, seen))
        self._world.history.seen = max(self._world.history.seen, len(seen))
        if self._world.dies_here(self):
            return
        self.shard.applied(step)
        self._busy = False
        if self._world.ahead is None:
            for one in due:
                self._acknowledge(one)
        self._report()
        self._work()

    # ---- the first server's ----

    def take_progress(self, server: int, progress: ServerProgress) -> None:
        if self.table is not None:
            self.table.stands(server, progress)
        else:
            self._progress[server] = progress
            self._open()

    def know(self, number: int, living: tuple[int, ...]) -> None:
        """Who is there: from the agents, in order, and none from before this process began."""
        if number <= self._received:
            return
        self._received, self._living = number, living
        if self.table is not None:
            self.table.lose(living)
        else:
            self._open()

    def _open(self) -> None:
        world = self._world
        if self.number or not self._received or len(self._progress) < world.history.num_servers:
            return
        self.table = LeaseTable(
            world.interval,
            world.rule,
            [self._progress[server] for server in range(world.history.num_servers)],
            num_rows=world.history.num_rows,
            number=self.incarnation,
            minutes=self._memory.table_state
            if world.defects.table_state
            else LeaseTableState.before(world.interval.first),
        )
        self.table.lose(self._living)
        if world.defects.expecting:
            self.table.expect(self._living)

    def left(self, worker: int, ticket: int) -> None:
        """It wants no more work, ever."""
        if self.table is None or not self._world.defects.leaving:
            return
        self.table.leave(worker)
        self._memory.table_state = self.table.minutes
        if not self._world.dies_here(self):
            self._world.send(f"worker {worker}", lambda target: target.answered(ticket, 0, 0, None))

    def asked(self, worker: int, of: int, ticket: int, met: int, request: int, holding: tuple[Lease, ...]) -> None:
        if self.table is None:
            return
        table, world = self.table, self._world
        answer = table.ask(worker, of, ticket, met, request, holding)
        if table.minutes != self._memory.table_state:
            self._memory.table_state = table.minutes
        world.history.rows_used = max(world.history.rows_used, table.rows_used)
        if isinstance(answer, LeaseGrant):
            world.note(Granted(world.now, worker, answer.held, answer.version))
            table.soon(worker, world.soon)
        if not world.dies_here(self):
            version = table.low
            world.send(f"worker {worker}", lambda target: target.answered(ticket, table.number, version, answer))


class Worker:
    def __init__(self, world: World, number: int) -> None:
        self._world, self.number, self.alive, self.has_left = world, number, True, False
        self.met = world.interval.first - 1
        self.inside: int | None = None
        """The step after which it synchronises now."""
        self.request = world.random.choice([0, 1])
        self._ticket, self._table, self._waits = 0, 0, False
        self._holding: dict[int, Lease] = {}
        self._filled: dict[int, SliceGradient] = {}
        self._applied: dict[int, set[int]] = {}
        self._writing: Lease | None = None
        self._computing: Lease | None = None
        self._chatty = world.random.random() < 0.2
        self._every_while()

    def _later(self, delay_s: float, action) -> None:
        self._world.at(delay_s, lambda: self.alive and not self.has_left and action())

    def die(self) -> None:
        self.alive = False
        self._stop_writing()

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self._world.rows[self._writing.row].leave(self._writing.filling)

    def break_off(self) -> None:
        """Its loop has ended: it says so until that was received, and nothing else."""
        self.has_left, self._waits = True, True
        self._stop_writing()
        self._say_that_it_leaves()

    def _say_that_it_leaves(self) -> None:
        if self.alive and self._waits:
            self._ticket += 1
            said = self.number, self._ticket
            self._world.send("server 0", lambda first: first.left(*said))
            self._world.at(ASK_EVERY_S, self._say_that_it_leaves)

    # ---- asking ----

    def _every_while(self) -> None:
        self._ask()
        self._later(ASK_EVERY_S * (0.8 + 0.4 * self._world.random.random()), self._every_while)

    def _ask(self) -> None:
        if self.inside is not None or (self._computing is not None and not self._chatty):
            return
        self._ticket, self._waits = self._ticket + 1, True
        for filling in self._filled:
            self._send(filling)
        if not self.alive:
            return
        said = self.number, self._table, self._ticket, self.met, self.request, tuple(self._holding.values())
        self._world.send("server 0", lambda first: first.asked(*said))

    def _send(self, filling: int) -> None:
        contribution, held = self._filled[filling], self._holding[filling]
        for server in self._world.random.sample(
            range(self._world.history.num_servers), self._world.history.num_servers
        ):
            if not self._world.dies_here(self):
                self._world.send(f"server {server}", lambda target: target.fill(contribution, held))

    def answered(self, ticket: int, table: int, version: int, answer: LeaseGrant | SyncPoint | None) -> None:
        if ticket != self._ticket or not self._waits:
            return
        self._waits, self._table = False, table
        if self.has_left:
            return
        self._forget(held for held in self._holding.values() if held.step <= version)
        match answer:
            case LeaseGrant() if self._computing is None and answer.held.filling not in self._holding:
                self._compute(answer)
            case SyncPoint():
                self._synchronise(answer)

    def applied(self, server: int, step: int) -> None:
        """Some filling of that step counts there."""
        self._applied.setdefault(step, set()).add(server)
        if len(self._applied[step]) == self._world.history.num_servers:
            self._forget(held for held in self._holding.values() if held.step == step)

    def _forget(self, known) -> None:
        for held in list(known):
            if held != self._computing:
                del self._holding[held.filling]
                self._filled.pop(held.filling, None)

    # ---- work ----

    def _compute(self, grant: LeaseGrant) -> None:
        self._computing = self._holding[grant.held.filling] = grant.held
        draw = self._world.random.random
        takes_s = draw() * (1.5 if draw() < self._world.tired else 0.1)
        self._later(takes_s, lambda: self._write(grant, draw() * (1.5 if draw() < self._world.tired else 0.05)))

    def _write(self, grant: LeaseGrant, takes_s: float) -> None:
        self._writing = grant.held
        self._world.rows[grant.held.row].begin(grant.held.filling)
        whole = all(memory.has_copy(grant.version) for memory in self._world.memories)
        self._later(takes_s, lambda: self._fill(grant, whole))

    def _fill(self, grant: LeaseGrant, whole: bool) -> None:
        held, self._writing, self._computing = grant.held, None, None
        whole = whole and all(memory.has_copy(grant.version) for memory in self._world.memories)
        self._world.rows[held.row].end(Content(held, grant.version, whole))
        self._filled[held.filling] = SliceGradient(
            held.step, held.place, held.row, held.filling, self.number, grant.version, 1.0, 1.0, (), b""
        )
        self._send(held.filling)
        self._ask()

    # ---- sync points ----

    def _synchronise(self, meet: SyncPoint) -> None:
        world = self._world
        applied = tuple((memory.low, memory.seen) for memory in world.memories)
        world.note(Met(world.now, self.number, meet.step, meet.why, applied))
        self.inside, self.request = meet.step, 0
        world.gather()

    def leave(self) -> None:
        assert self.inside is not None
        self._world.note(Left(self._world.now, self.number, self.inside))
        self.met, self.inside = self.inside, None
        if self._world.random.random() < 0.1:
            self.request = self._world.random.randint(1, 3)
        self._world.look_whether_all_is_done()
