"""Books of leases, and workers that talk to them, for tests: plain values on both sides."""

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


class Talk:
    """A book, and workers that send each ask once, with the tickets and the number that it wants."""

    def __init__(
        self, rule: Rule = SYNC, servers: int = 1, rows: int = 6, minutes: LeaseTableState | None = None, **more
    ):
        self.interval = interval(whole=rule.ahead is None, **more)
        standings = [ServerProgress(self.interval.first - 1)] * servers
        minutes = minutes or LeaseTableState.before(self.interval.first)
        self.book = LeaseTable(self.interval, rule, standings, num_rows=rows, number=1, minutes=minutes)
        self._ticket = 0

    def ask(self, worker: int = 1, *holding: Lease, met: int = 0, wish: int = 0) -> LeaseGrant | SyncPoint | None:
        self._ticket += 1
        return self.book.ask(worker, self.book.number, self._ticket, met, wish, holding)

    def work(self, worker: int = 1, *holding: Lease, met: int = 0) -> Lease:
        answer = self.ask(worker, *holding, met=met)
        assert isinstance(answer, LeaseGrant), answer
        return answer.held

    def fill(self, worker: int = 1, *holding: Lease, met: int = 0) -> Lease:
        held = self.work(worker, *holding, met=met)
        assert self.book.filled(held)
        return held

    def apply(self, low: int, server: int = 0, **more) -> None:
        self.book.stands(server, ServerProgress(low, **more))


def after(before: Talk, *workers: int, low: int = 0, rule: Rule = SYNC) -> Talk:
    talk = Talk(rule, minutes=before.book.minutes)
    talk.book = LeaseTable(
        talk.interval, rule, [ServerProgress(low)], num_rows=6, number=2, minutes=before.book.minutes
    )
    talk.book.expect(workers)
    return talk
