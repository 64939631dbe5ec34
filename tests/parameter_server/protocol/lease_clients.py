"""A lease table and the workers that send requests to it, for tests: plain values on both sides."""

from __future__ import annotations

from manyhands.parameter_server.protocol.leases import (
    Interval,
    Lease,
    LeaseGrant,
    LeaseTable,
    LeaseTableState,
    Rule,
    ServerProgress,
    SyncPoint,
)

SYNC, SSP, ASYNC = Rule(ahead=0), Rule(ahead=1), Rule(ahead=None)


def interval(**more) -> Interval:
    fields = {"call": 1, "first": 1, "last": 6, "start_row": 0, "num_rows": 12, "batch_size": 4, "slices": 2}
    return Interval(**{**fields, "whole": False, **more})


class LeaseClients:
    """A lease table, and workers that send each request once, with the tickets and the number that it expects."""

    def __init__(
        self, rule: Rule = SYNC, servers: int = 1, rows: int = 6, minutes: LeaseTableState | None = None, **more
    ):
        self.interval = interval(whole=rule.ahead is None, **more)
        progress = [ServerProgress(self.interval.first - 1)] * servers
        minutes = minutes or LeaseTableState.before(self.interval.first)
        self.table = LeaseTable(self.interval, rule, progress, num_rows=rows, number=1, minutes=minutes)
        self._ticket = 0

    def ask(self, worker: int = 1, *holding: Lease, met: int = 0, request: int = 0) -> LeaseGrant | SyncPoint | None:
        self._ticket += 1
        return self.table.ask(worker, self.table.number, self._ticket, met, request, holding)

    def work(self, worker: int = 1, *holding: Lease, met: int = 0) -> Lease:
        answer = self.ask(worker, *holding, met=met)
        assert isinstance(answer, LeaseGrant), answer
        return answer.held

    def fill(self, worker: int = 1, *holding: Lease, met: int = 0) -> Lease:
        held = self.work(worker, *holding, met=met)
        assert self.table.filled(held)
        return held

    def apply(self, low: int, server: int = 0, **more) -> None:
        self.table.stands(server, ServerProgress(low, **more))


def after(before: LeaseClients, *workers: int, low: int = 0, rule: Rule = SYNC) -> LeaseClients:
    clients = LeaseClients(rule, minutes=before.table.minutes)
    clients.table = LeaseTable(
        clients.interval, rule, [ServerProgress(low)], num_rows=6, number=2, minutes=before.table.minutes
    )
    clients.table.expect(workers)
    return clients
