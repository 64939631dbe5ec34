"""Leases in any order of events: no row has two writers, and without further events all workers end the interval."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
from tests.parameter_server.protocol.lease_clients import interval


class AnyOrder(RuleBasedStateMachine):
    """Workers that ask, fill, hold and die; one server that applies what is there, in order."""

    @initialize(
        ahead=st.sampled_from([0, 1, 2]),
        backups=st.integers(0, 2),
        slices=st.integers(1, 3),
        soon=st.sampled_from([0, 1, 3]),
    )
    def begin(self, ahead: int, backups: int, slices: int, soon: int) -> None:
        self.soon = soon
        self.rule = Rule(ahead=ahead, backups=backups)
        self.interval = interval(last=9, slices=slices, batch_size=2 * slices, num_rows=7 * slices)
        self.low, self.number = 0, 1
        self.table = self._new_table(LeaseTableState.before(1))
        self.holding: dict[int, list[Lease]] = {worker: [] for worker in range(3)}
        self.writing: dict[int, Lease] = {}
        self.met = dict.fromkeys(range(3), 0)
        self.filled: set[Item] = set()
        self.tickets = 0

    def _new_table(self, state: LeaseTableState) -> LeaseTable:
        progress = [ServerProgress(self.low)]
        return LeaseTable(self.interval, self.rule, progress, num_rows=5, number=self.number, minutes=state)

    @rule(data=st.data(), request=st.sampled_from([0, 0, 0, 1]))
    def ask(self, data: st.DataObject, request: int) -> None:
        worker = data.draw(st.sampled_from(sorted(self.holding)))
        self.tickets += 1
        holding = self.holding[worker] = [held for held in self.holding[worker] if held.step > self.low]
        if worker in self.writing and self.writing[worker] not in holding:
            holding.append(self.writing[worker])
        answer = self.table.ask(worker, self.number, self.tickets, self.met[worker], request, tuple(holding))
        if isinstance(answer, LeaseGrant):
            assert answer.held not in holding
            assert answer.version >= answer.held.step - 1 - self.rule.ahead
            assert answer.held.row not in {held.row for held in self.writing.values()}, "two would write to one row"
            self.writing[worker] = answer.held
            holding.append(answer.held)
            self.look_ahead(worker)
        if isinstance(answer, SyncPoint):
            assert answer.step == self.low
            assert not any(held.step > self.low for held in self.writing.values())
            self.met[worker] = answer.step

    def look_ahead(self, worker: int) -> None:
        expected = self.table.soon(worker, self.soon)
        assert len(expected) <= self.soon
        assert all(item.step <= self.interval.last for item in expected)
        others = [item for other in self.holding if other != worker for item in self.table.soon(other, 0)]
        assert not {*expected} & {*others, *(held.item for held in self.writing.values())}

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.writing)))
        held = self.writing.pop(worker)
        self.table.filled(held)
        self.filled.add(held.item)

    @rule()
    def apply(self) -> None:
        step = self.low + 1
        if step <= self.interval.last and all(
            (step, place) in self.filled for place in range(self.interval.items(step))
        ):
            self.low = step
        self.table.stands(
            0, ServerProgress(self.low, has=frozenset(item for item in self.filled if item.step > self.low))
        )

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.holding)))
        self.writing.pop(worker, None)
        del self.holding[worker], self.met[worker]
        newcomer = worker + 10
        self.holding[newcomer], self.met[newcomer] = [], 0
        self.table.lose(list(self.holding))

    @rule()
    def lose_table(self) -> None:
        self.number += 1
        self.table = self._new_table(self.table.minutes)
        self.table.lose(list(self.holding))
        self.table.expect(self.holding)
        self.filled = {item for item in self.filled if item.step <= self.low}

    @invariant()
    def rows_are_bounded(self) -> None:
        assert self.table.rows_used <= 5

    def teardown(self) -> None:
        """Without further events, all workers end the interval."""
        for _ in range(400):
            for worker in list(self.holding):
                self._one_round(worker)
            self.apply()
            if set(self.met.values()) == {self.interval.last}:
                break
        assert self.low == self.interval.last
        assert set(self.met.values()) == {self.interval.last}

    def _one_round(self, worker: int) -> None:
        if worker in self.writing:
            held = self.writing.pop(worker)
            self.filled.add(held.item)
        self.tickets += 1
        holding = self.holding[worker] = [held for held in self.holding[worker] if held.step > self.low]
        for held in holding:
            self.table.filled(held)
            self.filled.add(held.item)
        answer = self.table.ask(worker, self.number, self.tickets, self.met[worker], 0, tuple(holding))
        if isinstance(answer, LeaseGrant):
            self.writing[worker] = answer.held
            holding.append(answer.held)
        if isinstance(answer, SyncPoint):
            self.met[worker] = answer.step


AnyOrder.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestAnyOrderOfEvents = AnyOrder.TestCase
