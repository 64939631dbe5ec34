"""Averaging rounds on a server: the workers' results are combined once enough have arrived, without waiting for all.

What waits when a round closes is in it; what arrives later is in the next one. Servers count local-step ranges, so a
round of k is k updates: the first moves the weights by all of them, and is committed together with a list of the
others, which then only have to be counted. A dead server's successor finds that list. Start reading at
`RoundInterval.apply_one`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from manyhands.parallel.averaging.averaging_rules import combine
from manyhands.parallel.averaging.rounds import close_round
from manyhands.parameter_server.protocol.messages import UpdateDone
from manyhands.parameter_server.protocol.shard import SliceGradient
from manyhands.parameter_server.server.interval_state import IntervalState
from manyhands.parameter_server.server.lease_service import Outbox
from manyhands.parameter_server.server.shard_optimizer import Gradient

__all__ = ["RoundInterval"]


class RoundInterval(IntervalState):
    """An interval with a quorum, on the only server. `clock` returns seconds."""

    def __init__(self, *interval: Any, clock: Callable[[], float]) -> None:
        super().__init__(*interval)
        assert self.opened.quorum is not None and self.opened.servers == 1
        self._quorum, self._clock = self.opened.quorum, clock
        # After the buffers that leases name, and as many for frames from other hosts.
        self._sum_buffer = 2 * self.opened.rows
        self._arrived: dict[int, float] = {}
        """Fill id -> when it arrived."""

    @property
    def has_due(self) -> bool:
        return bool(self._owed) or self._closing_members() is not None

    def apply_one(self) -> Outbox:
        if self._owed:
            return self._carry_over()
        members = self._closing_members()
        if members is None or not self._are_intact(members):
            return []
        return self._apply_round(members)

    def _closing_members(self) -> list[SliceGradient] | None:
        """The members of the open round if it closes now, in the order of their ranges; None: it does not close yet."""
        waiting, now = {one.worker: one for one in self.shard.waiting}, self._clock()
        self._arrived = {one.filling: self._arrived.get(one.filling, now) for one in waiting.values()}
        if not waiting or self.lease_service is None or self.lease_service.table is None:
            return None
        begun = min(self._arrived.values())
        expected = sorted(self.lease_service.table.awaited() | waiting.keys())
        closing = close_round(
            {worker: self._arrived[one.filling] - begun for worker, one in waiting.items()},
            expected,
            quorum=self._quorum.of(len(expected)),
            deadline_s=self._quorum.deadline_s,
            now_s=now - begun,
        )
        if closing is None:
            return None
        return sorted((waiting[worker] for worker in closing.members), key=lambda one: one.step)

    def _apply_round(self, members: Sequence[SliceGradient]) -> Outbox:
        version, rows = self.shard.num_applied, [self._buffer_of(one) for one in members]
        statistics = [one for row in rows for one in self._served.read_statistics(row)]
        self._combine(rows, [float(self.opened.interval.rows(one.step)) for one in members])
        self.part.update(version, self._round_gradient(range(len(self._served.params))))
        if not self._are_intact(members):  # a buffer was leased to another worker while it was read
            return []
        self._buffers.update(version, members, statistics)
        self._owed = [self._done(version, place, one, len(members)) for place, one in enumerate(members)]
        return self._count(version)

    def _combine(self, rows: Sequence[int], weights: Sequence[float]) -> None:
        """Combine the buffers, into one that no worker uses."""
        views = [self._served.row(row).views for row in rows]
        for into, *each in zip(self._served.row(self._sum_buffer).views, *views, strict=True):
            into.copy_(combine(torch.stack(each), self._quorum.rule, weights, self._quorum.trim))

    def _round_gradient(self, present: Sequence[int]) -> Gradient:
        return Gradient((self._sum_buffer,), present, 1.0)

    def _done(self, version: int, place: int, one: SliceGradient, together: int) -> UpdateDone:
        rows, staleness = self.opened.interval.rows(one.step), version - one.based_on
        loss = one.total / one.weight
        return UpdateDone(version + 1 + place, one.step, loss, rows, self._lr, staleness, None, together)

    def _carry_over(self) -> Outbox:
        """Count one more member of a round whose weights are committed: they stay the same."""
        version = self.shard.num_applied
        self.part.update(version, self._round_gradient([]))
        self._buffers.update(version, [], [])
        return self._count(version)

    def _count(self, version: int) -> Outbox:
        done, *self._owed = self._owed
        self._journal.write(done.update, msgspec.msgpack.encode(done))
        self.shard.applied(done.step)
        self._commit()
        self.part.updated(version)
        self._served.set_version(self._number, version + 1)
        sender = self._senders.pop(done.step, None)
        return [(sender, self._applied(done.step))] if sender is not None else []
