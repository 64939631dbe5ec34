"""The first server's answers to work requests: the next lease, and the updates applied since the last request.

A lease table (`leases`) is created once the progress of every server and the live workers are known. What its
successor needs is persisted, in memory that outlives the server, before any reply that depends on it is sent. Start
reading at `LeaseService.answer`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from manyhands.parameter_server.memory.versioned_memory import JOURNAL_LENGTH, VersionedMemory
from manyhands.parameter_server.protocol.leases import (
    Item,
    Lease,
    LeaseGrant,
    LeaseTable,
    LeaseTableState,
    Rule,
    ServerProgress,
    SyncPoint,
)
from manyhands.parameter_server.protocol.messages import Number, Open, Reply, UpdateDone, Values, Watermark, WorkRequest
from manyhands.parameter_server.protocol.shard import Shard
from manyhands.parameter_server.server.update_replay import UpdateReplay, first_table_state

__all__ = ["MAX_TOLD", "LeaseService", "Outbox"]

MAX_TOLD = 200
"""Maximum number of updates that one reply reports."""

Outbox = list[tuple[bytes, Any]]


class _PersistedTable(msgspec.Struct, frozen=True, array_like=True):
    """The state of a lease table, with its number and its interval's."""

    interval: Number
    book: int
    minutes: LeaseTableState | None


class LeaseService:
    """Hands out the leases of one interval."""

    def __init__(self, opened: Open, served: VersionedMemory, shard: Shard, replay: UpdateReplay | None) -> None:
        """`replay`: writes the log, where there is one."""
        self._opened, self._shard, self._replay = opened, shard, replay
        self._state_register, self._journal = served.minutes(), served.journal()
        self.requests: dict[int, tuple[bytes, WorkRequest]] = {}
        """Worker -> its open request, and its address."""
        self._updates_known: dict[int, int] = {}
        """How many updates each worker knows, by its last request."""
        self._values: dict[int, Values] = {}
        """The workers' latest values. Lost with this server: workers send them again."""
        self.table: LeaseTable | None = None
        self._progress: dict[int, ServerProgress] = {}
        self._live_workers: frozenset[int] | None = None
        self._checkpoint_requests: set[int] = set()
        """Servers that request a checkpoint."""

    def filled(self, held: Lease) -> None:
        if self.table is not None:
            self.table.filled(held)

    def set_living_workers(self, living: frozenset[int]) -> None:
        self._live_workers = living.intersection(self._opened.workers)
        self.requests = {worker: request for worker, request in self.requests.items() if worker in living}
        self._values = {worker: values for worker, values in self._values.items() if worker in living}
        if self.table is not None:
            self.table.lose(self._live_workers)
        else:
            self._create_table()

    def _create_table(self) -> None:
        """Once the progress of every server and the live workers are known."""
        opened = self._opened
        if self._live_workers is None or len(self._progress) < opened.servers:
            return
        found = self._state_register.value
        before = (
            msgspec.msgpack.decode(found, type=_PersistedTable) if found else _PersistedTable(opened.number, 0, None)
        )
        same = before.minutes if before.interval == opened.number else None
        progress = [self._progress[server] for server in range(opened.servers)]
        self.table = LeaseTable(
            opened.interval,
            Rule(ahead=opened.ahead, backups=opened.backups, alone=opened.alone),
            progress,
            num_rows=opened.rows,
            number=before.book + 1,
            minutes=same or first_table_state(opened, progress),
        )
        self._persist_state(self.table)
        self.table.lose(self._live_workers)
        if same is not None:  # without an earlier table of this interval no worker holds a lease
            self.table.expect(self._live_workers)

    def _persist_state(self, table: LeaseTable) -> None:
        """Called before any reply that depends on the state is sent."""
        encoded = msgspec.msgpack.encode(_PersistedTable(self._opened.number, table.number, table.minutes))
        if encoded != self._state_register.value:
            self._state_register.write(encoded)

    def take_progress(self, message: Watermark) -> None:
        if 0 < message.server < self._opened.servers:
            has = frozenset(Item(*item) for item in message.has)
            self._set_progress(message.server, ServerProgress(message.low, frozenset(message.seen), has))
            (self._checkpoint_requests.add if message.save else self._checkpoint_requests.discard)(message.server)

    def _set_progress(self, server: int, progress: ServerProgress) -> None:
        if self.table is not None:
            self.table.stands(server, progress)
        else:
            self._progress[server] = progress
            self._create_table()

    def answer(self) -> Outbox:
        """Replies to all workers for which there is something."""
        self._set_progress(0, self._shard.standing())
        if self.table is None:
            return []
        living = self._live_workers or frozenset()
        self._updates_known |= {
            worker: request.told for worker, (_, request) in self.requests.items() if worker in living
        }
        may_lease, outbox = self._journal_suffices(self.table), Outbox()
        for worker, (sender, request) in list(self.requests.items()):
            done, is_complete = self._new_updates(request.told)
            if request.leaves:
                self.table.leave(worker)
            self._keep_values(request)
            answer = None
            if is_complete and may_lease:
                # Workers do not write while they wait for a reply: buffers of steps that all servers applied are free.
                holding = [held for held in request.holding if not self.table.has_applied(held.step)]
                answer = self.table.ask(worker, request.book, request.ticket, request.met, request.wish, holding)
            if answer is None and not (done or request.leaves) and request.book == self.table.number:
                continue
            del self.requests[worker]
            outbox.append((sender, self._reply(self.table, request, answer, done)))
        self._persist_state(self.table)
        return outbox

    def _keep_values(self, request: WorkRequest) -> None:
        if request.leaves:
            self._values.pop(request.worker, None)
        elif request.values:
            self._values[request.worker] = request.values

    def _reply(
        self, table: LeaseTable, request: WorkRequest, answer: LeaseGrant | SyncPoint | None, done: list[UpdateDone]
    ) -> Reply:
        return Reply(
            number=request.number,
            ticket=request.ticket,
            book=table.number,
            version=answer.version if isinstance(answer, LeaseGrant) else table.low,
            work=answer.held if isinstance(answer, LeaseGrant) else None,
            meet=answer.step if isinstance(answer, SyncPoint) else None,
            why=answer.why if isinstance(answer, SyncPoint) else 0,
            done=done,
            values=[values for worker, values in self._values.items() if worker != request.worker],
            soon=table.soon(request.worker, request.soon)
            if isinstance(answer, LeaseGrant) and request.soon > 0
            else [],
            save=bool(self._checkpoint_requests) or (self._replay is not None and self._replay.wants_checkpoint),
        )

    def _new_updates(self, known: int) -> tuple[list[UpdateDone], bool]:
        """Updates that a worker has not been sent yet, and whether these are all."""
        updates = self._shard.num_applied
        if self._replay is not None and self._shard.in_order and self.table is not None:
            updates = min(updates, self.table.low)  # what one log lacks is computed again if the host is lost
        found = [self._journal.read(number) for number in range(known + 1, min(updates, known + MAX_TOLD) + 1)]
        done = [msgspec.msgpack.decode(one, type=UpdateDone) for one in found if one is not None]
        return done, updates <= known + MAX_TOLD

    def _journal_suffices(self, table: LeaseTable) -> bool:
        """Whether the journal keeps what the slowest worker still has to be sent, once all leased steps are applied."""
        updates, workers = self._shard.num_applied, (self._live_workers or frozenset()).difference(table.minutes.left)
        slowest = min((self._updates_known.get(worker, self._opened.version) for worker in workers), default=updates)
        return updates + min(self._opened.rows, JOURNAL_LENGTH // 2) <= slowest + JOURNAL_LENGTH
