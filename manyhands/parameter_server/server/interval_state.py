"""A server's state during one interval: gradients that wait, updates, and on the first server the model's buffers.

`server` passes messages on and begins intervals; workers request leases from the first server's `lease_service`. An
update counts once it is committed, together with what was applied, to memory that outlives the server. Start reading
at `IntervalState.fill` and `IntervalState.apply_one`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from torch import Tensor, nn

from manyhands.embedding.row_layer import TableGradient as RowSum
from manyhands.parallel.gradients.network_sum import total_weight
from manyhands.parallel.model.step_buffers import ForeignState
from manyhands.parameter_server.log.write_ahead_log import LoggedUpdate
from manyhands.parameter_server.memory.buffer_versions import BufferVersions
from manyhands.parameter_server.memory.compatibility import check_length
from manyhands.parameter_server.memory.optimizer_states import load_settings, plain_schedule, settings_of
from manyhands.parameter_server.memory.versioned_memory import StateTorn, VersionedMemory
from manyhands.parameter_server.protocol.messages import (
    Filled,
    GradientPart,
    Number,
    Open,
    UpdateApplied,
    UpdateDone,
    Want,
)
from manyhands.parameter_server.protocol.shard import Shard, SliceGradient
from manyhands.parameter_server.server.lease_service import LeaseService, Outbox
from manyhands.parameter_server.server.remote_worker_service import RemoteWorkerService
from manyhands.parameter_server.server.shard_optimizer import Gradient, ShardOptimizer
from manyhands.parameter_server.server.update_replay import UpdateReplay, statistics_from
from manyhands.parameter_server.tables.server_tables import ServerTables, pieces_of

__all__ = ["CommittedState", "IntervalState", "more_of"]


class CommittedState(msgspec.Struct, frozen=True, kw_only=True):
    """What a server commits with every update, beside weights and optimizer states."""

    number: Number
    low: int
    seen: list[int]
    counts: list[int]
    more: bytes
    groups: list[dict[str, Any]]
    scheduler: dict[str, Any] | None
    owed: list[UpdateDone] = []
    """Steps of a round that are in the weights, but not counted yet."""

    @property
    def version(self) -> int:
        return self.low + len(self.seen)


def more_of(committed: bytes, opened: Open) -> bytes:
    """The states that are not in shared memory, as a server committed them in this interval, or as it began."""
    saved = msgspec.msgpack.decode(committed, type=CommittedState) if committed else None
    return saved.more if saved is not None and saved.number == opened.number else opened.more


class IntervalState:
    """A server's state during one interval."""

    def __init__(
        self,
        number: int,
        model: nn.Module,
        scheduler: Any,
        opened: Open,
        saved: CommittedState,
        served: VersionedMemory,
        part: ShardOptimizer,
        remote_workers: RemoteWorkerService,
        tables: ServerTables,
        foreign: ForeignState,
        replay: UpdateReplay | None = None,
    ) -> None:
        """`replay`: writes the log, where there is one."""
        self.opened, self.part, self.remote_workers, self.tables, self.replay = (
            opened,
            part,
            remote_workers,
            tables,
            replay,
        )
        self._away = frozenset(opened.away)
        self._number, self._scheduler, self._served = number, scheduler, served
        self._register = served.standing(number)
        self.shard = Shard(opened.interval, in_order=opened.ahead is not None, low=saved.low, seen=saved.seen)
        self._intent = served.intent(number)
        self.shard.first = self._unfinished_step(saved)
        self._owed = saved.owed
        self._senders: dict[int, bytes] = {}
        """Step -> the worker that waits for the message that it is applied."""
        self._rows_of, self._rows = -1, b""
        """Packed embedding rows, and how many updates they had seen."""
        self.lease_service = LeaseService(opened, served, self.shard, replay) if number == 0 else None
        if number == 0:
            self._journal = served.journal()
            self._buffers = BufferVersions(model, foreign, served, saved.version, mixed_versions=opened.ahead != 0)

    # ---- messages ----

    def fill(self, sender: bytes, message: Filled) -> Outbox:
        held = message.held
        if self.lease_service is not None:
            self.lease_service.filled(held)
        if self.shard.is_applied(held.step):
            self.tables.drop([held.filling])
            return [(sender, self._applied(held.step))]
        contribution = SliceGradient(
            step=held.step,
            place=held.place,
            row=held.row,
            filling=held.filling,
            worker=message.worker,
            based_on=message.based_on,
            total=message.total,
            weight=message.weight,
            absent=tuple(message.absent),
            changes=message.changes,
            tables=tuple(message.tables),
        )
        known = message.worker in self.opened.workers and 0 <= held.row < self.opened.rows
        known = known and message.based_on <= self.shard.num_applied  # no worker has weights of a future version
        is_whole = self.tables.has(held.filling, message.pieces)
        if known and held.filling > 0 and is_whole and self._is_there(contribution) and self._accept_handed(message):
            self._senders[held.step] = sender
            self.shard.fill(contribution)
        return []

    def _accept_handed(self, message: Filled) -> bool:
        if message.worker in self._away and message.handed:
            return False
        return self.tables.keep_handed(message.held.filling, message.held.row, message.handed)

    def take(self, sender: bytes, message: GradientPart) -> Outbox:
        if self.shard.is_applied(message.held.step):
            return [(sender, self.remote_workers.enough(message.held))]
        got = self.remote_workers.take(message)
        return [(sender, got)] if got is not None else []

    def give(self, sender: bytes, message: Want) -> Outbox:
        if message.of == "tables":
            part = self.remote_workers.give_bytes(message, self._packed())
        else:
            part = self.remote_workers.give(
                message, self.shard.num_applied, lambda: more_of(self.committed, self.opened)
            )
        return [(sender, part)] if part is not None else []

    def _packed(self) -> bytes:
        """This server's embedding rows as they are now; the same for all frames of them."""
        if self._rows_of != self.shard.num_applied:
            self._rows_of, self._rows = self.shard.num_applied, self.tables.pack()
        return self._rows

    @property
    def committed(self) -> bytes:
        return self._register.value

    @property
    def wants_checkpoint(self) -> bool:
        return self.replay is not None and self.replay.wants_checkpoint

    # ---- updates ----

    @property
    def has_due(self) -> bool:
        return self.shard.due() is not None

    def apply_one(self) -> Outbox:
        due = self.shard.due()
        if due is None:
            return []
        return self._apply(due) if self._are_intact(due) else []

    def catch_up(self) -> None:
        """Repeat the updates that are in the log and not in memory."""
        for logged in self.replay.past(self.shard) if self.replay is not None else ():
            self._replay_update(logged)

    def _are_intact(self, due: Sequence[SliceGradient]) -> bool:
        gone = [one for one in due if not self._is_there(one)]
        for one in gone:
            self.shard.drop(one)
        return not gone

    def _is_there(self, one: SliceGradient) -> bool:
        if one.worker in self._away:
            return self.remote_workers.has(one.row, one.filling)
        return self._served.filling(one.row) == one.filling

    def _buffer_of(self, one: SliceGradient) -> int:
        return self.remote_workers.row(one.row) if one.worker in self._away else one.row

    def _apply(self, due: Sequence[SliceGradient]) -> Outbox:
        step, gradient = due[0].step, self._gradient(due, [self._buffer_of(one) for one in due])
        statistics = [] if self._number else [one for row in gradient.rows for one in self._served.read_statistics(row)]
        if self.replay is not None:
            gradient, found = self.replay.take(gradient), self._row_sums(due)
            if not self._are_intact(due):
                return []
            pieces, settings = pieces_of(self.opened.number, due[0].filling, found), settings_of(self.part.optimizer)
            self.replay.write(self.shard, due, gradient.present, settings, statistics, pieces)
            norm = self._update(gradient)
        else:
            norm, found = self._update(gradient), self._row_sums(due)
            if not self._are_intact(due):  # the buffer was leased to another worker while it was read
                if self.opened.in_place:
                    raise StateTorn(self._number, self.shard.num_applied)
                return []
        self._finish_update(due, gradient.factor, statistics, norm, found)
        sender = self._senders.pop(step, None)
        return [(sender, self._applied(step))] if sender is not None else []

    def _row_sums(self, due: Sequence[SliceGradient]) -> list[RowSum]:
        """The sum of their gradients of embedding rows."""
        return self.tables.gather([one.filling for one in due])

    def _replay_update(self, logged: LoggedUpdate) -> None:
        assert self.replay is not None
        due = logged.update.contributions
        gradient = self.replay.put(logged, self._gradient(due, ()))
        load_settings(self.part.optimizer, logged.update.groups)
        for piece in logged.update.pieces:
            self.tables.keep(piece)
        norm = self._update(gradient)
        self._finish_update(due, gradient.factor, statistics_from(logged.update.statistics), norm, self._row_sums(due))

    def _update(self, gradient: Gradient) -> float | None:
        version = self.shard.num_applied
        self._served.begin_update(self._number, version + 1)
        return self.part.update(version, gradient)

    def _gradient(self, due: Sequence[SliceGradient], rows: Sequence[int]) -> Gradient:
        step = due[0].step
        factor = self.opened.interval.rows(step) / total_weight((one.weight for one in due), step)
        absent = set.intersection(*(set(one.absent) for one in due))
        present = [place for place in range(len(self._served.params)) if place not in absent]
        return Gradient(tuple(rows), present, factor / (1 + self._staleness(due) if self.opened.damping else 1))

    def _staleness(self, due: Sequence[SliceGradient]) -> int:
        return max(self.shard.num_applied - one.based_on for one in due)

    def _finish_update(
        self,
        due: Sequence[SliceGradient],
        factor: float,
        statistics: Sequence[Tensor],
        norm: float | None,
        found: Sequence[RowSum],
    ) -> None:
        """The rest of an update, after the optimizer ran; and commit it."""
        step, version = due[0].step, self.shard.num_applied
        rows = self.opened.interval.rows(step)
        if self.tables:
            self._apply_rows(due, version + 1, found, factor)
            self.tables.drop([one.filling for one in due])
        if self._number == 0:
            self._buffers.update(version, due, statistics)
            loss = sum(one.total for one in due) / sum(one.weight for one in due)
            done = UpdateDone(version + 1, step, loss, rows, self._lr, self._staleness(due), norm)
            self._journal.write(version + 1, msgspec.msgpack.encode(done))
        self._advance_schedule(rows)
        self.shard.applied(step)
        self._commit()
        self.part.updated(version)
        self._served.set_version(self._number, version + 1)

    def _advance_schedule(self, rows: int) -> None:
        """Once for each batch of an update."""
        if self.opened.scheduled and self._scheduler is not None:
            for _ in range(-(-rows * self.opened.batches_per_step // self.opened.interval.batch_size)):
                self._scheduler.step()

    def _apply_rows(self, due: Sequence[SliceGradient], number: int, found: Sequence[RowSum], factor: float) -> None:
        """Parts of tables are committed one by one: a successor after a crash here has to continue with this step."""
        if not self.shard.in_order:
            self._intent.write(msgspec.msgpack.encode((self.opened.number, number, due[0].step)))
        touched = dict.fromkeys(table for one in due for table in one.tables)
        self.tables.apply(number, found, factor, list(touched))

    def _unfinished_step(self, saved: CommittedState) -> int | None:
        """The step that this server's predecessor had begun to apply to embedding rows, and did not commit."""
        if not self._intent.value:
            return None
        interval, number, step = msgspec.msgpack.decode(self._intent.value, type=tuple[Number, int, int])
        return step if (interval, number) == (self.opened.number, saved.version + 1) else None

    def _commit(self) -> None:
        saved = CommittedState(
            number=self.opened.number,
            low=self.shard.low,
            seen=sorted(self.shard.seen),
            counts=self.part.counts(),
            more=self.part.more(),
            groups=settings_of(self.part.optimizer),
            scheduler=plain_schedule(self._scheduler),
            owed=self._owed,
        )
        encoded = msgspec.msgpack.encode(saved)
        check_length(len(encoded), self._register.most_bytes, f"What server {self._number} commits with every update")
        self._register.write(encoded)

    @property
    def _lr(self) -> float:
        return float(self.part.optimizer.param_groups[0]["lr"])

    def _applied(self, step: int) -> UpdateApplied:
        return UpdateApplied(number=self.opened.number, server=self._number, step=step)
