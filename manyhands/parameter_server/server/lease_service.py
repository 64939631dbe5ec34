"""Where workers ask the first server: what they are to compute next, and what has been applied since they last asked.

A book of leases (`leases`) is opened once it is known where every server stands and who is alive. What the next book
has to know is in memory that outlives the server before any answer goes out that rests on it. Start reading at
`Reception.answer`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from manyhands.parameter_server.memory.versioned_memory import JOURNAL_LENGTH, ServedMemory
from manyhands.parameter_server.protocol.leases import Book, Grant, Held, Item, Meet, Minutes, Rule, Standing
from manyhands.parameter_server.protocol.messages import Ask, Done, Number, Open, Reply, Stand, Values
from manyhands.parameter_server.protocol.shard import Shard
from manyhands.parameter_server.server.update_replay import Keeper, first_minutes

__all__ = ["MAX_TOLD", "Outbox", "Reception"]

MAX_TOLD = 200
"""Updates that one reply tells of."""

Outbox = list[tuple[bytes, Any]]


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    """The minutes of a book, with its number and its course's."""

    course: Number
    book: int
    minutes: Minutes | None


class Reception:
    """Of one course."""

    def __init__(self, opened: Open, served: ServedMemory, shard: Shard, keeper: Keeper | None) -> None:
        """`keeper`: of the log, where there is one."""
        self._opened, self._shard, self._keeper = opened, shard, keeper
        self._minutes, self._journal = served.minutes(), served.journal()
        self.asks: dict[int, tuple[bytes, Ask]] = {}
        """Worker -> what it asks, and from where."""
        self._told: dict[int, int] = {}
        """How many updates each worker has said it knows of."""
        self._values: dict[int, Values] = {}
        """What workers have told of themselves. Lost with this server: they tell it again."""
        self.book: Book | None = None
        self._standings: dict[int, Standing] = {}
        self._living: frozenset[int] | None = None
        self._others_want: set[int] = set()
        """Servers that would like a checkpoint."""

    def filled(self, held: Held) -> None:
        if self.book is not None:
            self.book.filled(held)

    def hear_living(self, living: frozenset[int]) -> None:
        self._living = living.intersection(self._opened.workers)
        self.asks = {worker: ask for worker, ask in self.asks.items() if worker in living}
        self._values = {worker: told for worker, told in self._values.items() if worker in living}
        if self.book is not None:
            self.book.lose(self._living)
        else:
            self._open_book()

    def _open_book(self) -> None:
        """Once it is known where every server stands, and who is there."""
        opened = self._opened
        if self._living is None or len(self._standings) < opened.servers:
            return
        found = self._minutes.value
        before = msgspec.msgpack.decode(found, type=_Kept) if found else _Kept(opened.number, 0, None)
        same = before.minutes if before.course == opened.number else None
        standings = [self._standings[server] for server in range(opened.servers)]
        self.book = Book(
            opened.course,
            Rule(ahead=opened.ahead, backups=opened.backups, alone=opened.alone),
            standings,
            num_rows=opened.rows,
            number=before.book + 1,
            minutes=same or first_minutes(opened, standings),
        )
        self._keep_minutes(self.book)
        self.book.lose(self._living)
        if same is not None:  # in a course that has had no book nobody holds anything
            self.book.expect(self._living)

    def _keep_minutes(self, book: Book) -> None:
        """Before any answer goes out that rests on them."""
        told = msgspec.msgpack.encode(_Kept(self._opened.number, book.number, book.minutes))
        if told != self._minutes.value:
            self._minutes.write(told)

    def stands(self, message: Stand) -> None:
        if 0 < message.server < self._opened.servers:
            has = frozenset(Item(*item) for item in message.has)
            self._stand(message.server, Standing(message.low, frozenset(message.seen), has))
            (self._others_want.add if message.save else self._others_want.discard)(message.server)

    def _stand(self, server: int, standing: Standing) -> None:
        if self.book is not None:
            self.book.stands(server, standing)
        else:
            self._standings[server] = standing
            self._open_book()

    def answer(self) -> Outbox:
        """Everybody for whom there is something."""
        self._stand(0, self._shard.standing())
        if self.book is None:
            return []
        living = self._living or frozenset()
        self._told |= {worker: ask.told for worker, (_, ask) in self.asks.items() if worker in living}
        can_tell, outbox = self._can_tell(self.book), Outbox()
        for worker, (sender, ask) in list(self.asks.items()):
            done, all_told = self._news(ask.told)
            if ask.leaves:
                self.book.leave(worker)
            self._keep_values(ask)
            answer = None
            if all_told and can_tell:
                # Workers ask when they write nothing: the row of what is applied everywhere is nobody's.
                holding = [held for held in ask.holding if not self.book.has_applied(held.step)]
                answer = self.book.ask(worker, ask.book, ask.ticket, ask.met, ask.wish, holding)
            if answer is None and not (done or ask.leaves) and ask.book == self.book.number:
                continue
            del self.asks[worker]
            outbox.append((sender, self._reply(self.book, ask, answer, done)))
        self._keep_minutes(self.book)
        return outbox

    def _keep_values(self, ask: Ask) -> None:
        if ask.leaves:
            self._values.pop(ask.worker, None)
        elif ask.values:
            self._values[ask.worker] = ask.values

    def _reply(self, book: Book, ask: Ask, answer: Grant | Meet | None, done: list[Done]) -> Reply:
        return Reply(
            number=ask.number,
            ticket=ask.ticket,
            book=book.number,
            version=answer.version if isinstance(answer, Grant) else book.low,
            work=answer.held if isinstance(answer, Grant) else None,
            meet=answer.step if isinstance(answer, Meet) else None,
            why=answer.why if isinstance(answer, Meet) else 0,
            done=done,
            values=[told for worker, told in self._values.items() if worker != ask.worker],
            soon=book.soon(ask.worker, ask.soon) if isinstance(answer, Grant) and ask.soon > 0 else [],
            save=bool(self._others_want) or (self._keeper is not None and self._keeper.wants_checkpoint),
        )

    def _news(self, told: int) -> tuple[list[Done], bool]:
        """Updates that a worker has not heard of, and whether these are all."""
        updates = self._shard.num_applied
        if self._keeper is not None and self._shard.in_order and self.book is not None:
            updates = min(updates, self.book.low)  # what some log lacks is computed again if the host is lost
        found = [self._journal.read(number) for number in range(told + 1, min(updates, told + MAX_TOLD) + 1)]
        done = [msgspec.msgpack.decode(one, type=Done) for one in found if one is not None]
        return done, updates <= told + MAX_TOLD

    def _can_tell(self, book: Book) -> bool:
        """Whether the journal still has what the slowest has not heard of, once all that may be leased is applied."""
        updates, workers = self._shard.num_applied, (self._living or frozenset()).difference(book.minutes.left)
        slowest = min((self._told.get(worker, self._opened.version) for worker in workers), default=updates)
        return updates + min(self._opened.rows, JOURNAL_LENGTH // 2) <= slowest + JOURNAL_LENGTH
