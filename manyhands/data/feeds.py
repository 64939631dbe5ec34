"""From a position to steps and their batches, for rows by number. Streams have a feed of their own (`stream_source`).

`plan_steps` is the whole decision: pure, endless if asked, the same on every worker. `RowFeed` has its slices
fetched in that order. What a step looks like to a strategy is `batches`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from manyhands.data.custom_orders import Order
from manyhands.data.fetchers import Fetcher, InCaller, InThread, Job, fetch_now
from manyhands.data.lease_prefetch import Ahead, how_far
from manyhands.data.loader_processes import InProcesses, Loader
from manyhands.data.row_exchange import RowExchange
from manyhands.data.sample_order import Division, Position, num_slices, order, slice_bounds, slice_key
from manyhands.data.sources.row_source import RowSource

__all__ = [
    "STEPS_AHEAD",
    "Bounds",
    "EpochOrder",
    "Feed",
    "Plan",
    "RowFeed",
    "Schedule",
    "SharedFilesFeed",
    "cut",
    "start_fetcher",
    "total_steps",
]

STEPS_AHEAD = 2
# The order is computed for this many rows at a time: for a batch of 64 alone the fixed cost would be 100 microseconds.
_ORDER_BLOCK = 32768

Bounds = tuple[tuple[int, int], ...]


class Schedule(NamedTuple):
    """What every worker of a run agrees on."""

    batch_size: int
    slices: int
    position: Position
    first_step: int
    epochs: int | None
    steps: int | None
    shuffle: bool = True


class Plan(NamedTuple):
    """One step, before anything is fetched: rows [start, start + rows) of the epoch's order, cut at `bounds`."""

    number: int
    epoch: int
    start: int
    rows: int
    bounds: Bounds
    last_of_epoch: bool


class Feed(Protocol):
    def plans(self) -> Iterator[Plan]: ...

    def get(self, plan: Plan, v: int) -> Any:
        """The batch of one of this worker's slices, in order."""

    def again(self, plan: Plan, v: int) -> Any:
        """The batch of any slice of a step, at any time, also after `close`; may be slow."""

    def divide(self, division: Division) -> None:
        """From the next step on, slices are divided like this. Between steps, on every worker at the same one."""

    def close(self) -> None: ...


@functools.lru_cache(maxsize=64)
def cut(rows: int, slices: int, short: bool) -> Bounds:
    return tuple(slice_bounds(rows, num_slices(rows, slices, short=short)))


def plan_steps(num_rows: int, schedule: Schedule) -> Iterator[Plan]:
    """The steps from the schedule's position on."""
    batch_size, number = schedule.batch_size, schedule.first_step
    epoch, start = schedule.position.epoch, schedule.position.row
    while schedule.epochs is None or epoch < schedule.epochs:
        while start < num_rows:
            if schedule.steps is not None and number > schedule.steps:
                return
            rows = min(batch_size, num_rows - start)
            bounds = cut(rows, schedule.slices, rows < batch_size)
            yield Plan(number, epoch, start, rows, bounds, start + rows == num_rows)
            number, start = number + 1, start + rows
        epoch, start = epoch + 1, 0


def plan_at(num_rows: int, schedule: Schedule, number: int) -> Plan:
    """The same step as `plan_steps` gives it, without those before it."""
    batch_size, position = schedule.batch_size, schedule.position
    epoch, start = position.epoch, position.row + (number - schedule.first_step) * batch_size
    if start >= num_rows:
        beyond = number - schedule.first_step - -(-(num_rows - position.row) // batch_size)
        per_epoch = -(-num_rows // batch_size)
        epoch, start = epoch + 1 + beyond // per_epoch, beyond % per_epoch * batch_size
    rows = min(batch_size, num_rows - start)
    bounds = cut(rows, schedule.slices, rows < batch_size)
    return Plan(number, epoch, start, rows, bounds, start + rows == num_rows)


def total_steps(num_rows: int, schedule: Schedule) -> int | None:
    """Steps of the whole run, those before the position included; None for a run without an end."""
    if schedule.epochs is None:
        return schedule.steps
    position, batch_size = schedule.position, schedule.batch_size
    whole = max(0, schedule.epochs - position.epoch - 1) * -(-num_rows // batch_size)
    this = -(-(num_rows - position.row) // batch_size) if position.epoch < schedule.epochs else 0
    total = schedule.first_step - 1 + this + whole
    return total if schedule.steps is None else min(total, schedule.steps)


class EpochOrder:
    """`order`, or an order of the user's choice, computed in blocks and remembered; one per thread that asks."""

    def __init__(
        self, num_rows: int, seed: int, shuffle: bool, chosen: Order | None = None, batch_size: int = 1
    ) -> None:
        """`num_rows`: positions of an epoch."""
        self._num_rows, self._seed, self._shuffle = num_rows, seed, shuffle
        self._chosen, self._batch_size = chosen, batch_size
        self._epoch, self._start, self._block = -1, 0, np.empty(0, np.int64)

    def rows(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        if epoch != self._epoch or start < self._start or stop > self._start + len(self._block):
            end = min(self._num_rows, max(stop, start + _ORDER_BLOCK))
            self._block = self._compute(epoch, start, end)
            self._epoch, self._start = epoch, start
        return self._block[start - self._start : stop - self._start]

    def _compute(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        if self._chosen is not None:
            return self._chosen.rows(self._batch_size, self._seed, epoch, start, stop)
        return order(self._num_rows, self._seed, epoch, start, stop, shuffle=self._shuffle)


class RowFeed:
    """Steps over rows by number; this worker's slices are fetched ahead where the source allows it."""

    def __init__(self, source: RowSource, schedule: Schedule, rank: int, division: Division) -> None:
        self._source, self._schedule, self._rank, self._division = source, schedule, rank, division
        self._order = self._new_order()
        self._draws = source.fetched_by == "caller"
        self._fetcher: Fetcher | None = None
        self._loader: Loader | None = None
        self._ahead: Ahead | None = None

    def plans(self) -> Iterator[Plan]:
        return plan_steps(self._source.num_positions, self._schedule)

    def plan_at(self, number: int) -> Plan:
        return plan_at(self._source.num_positions, self._schedule, number)

    def get(self, plan: Plan, v: int) -> Any:
        if self._source.fetched_by == "memory":
            return fetch_now(self._source.take_job, self._job(plan, v, self._order), draws=False)
        if self._fetcher is None:
            self._fetcher = self._start_fetching(plan)  # only now, so that making a feed starts nothing
        return self._fetcher.get(plan.number, v)

    def again(self, plan: Plan, v: int) -> Any:
        if self._ahead is not None and self._ahead.has(plan.number, v):
            return self._ahead.take(plan.number, v)
        return fetch_now(self._source.take_job, self._job(plan, v, self._order))

    @property
    def how_far(self) -> int:
        """How many leases ahead it is of use to know."""
        return how_far(self._source)

    def expect(self, wanted: Sequence[tuple[Plan, int]]) -> None:
        """Have these fetched ahead of `again`, which will ask for some of them, and no others."""
        if self._ahead is None:
            self._ahead = Ahead(self._source)
        self._ahead.want([self._job(plan, v, self._order) for plan, v in wanted])

    def divide(self, division: Division) -> None:
        """What was fetched ahead may be somebody else's now, and is dropped. Loader processes stay."""
        self._division = division
        if self._fetcher is not None:
            self._fetcher.close()
            self._fetcher = None

    def close(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()
        if self._loader is not None:
            self._loader.close()
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _start_fetching(self, first: Plan) -> Fetcher:
        ahead = STEPS_AHEAD * max(1, len(self._division.share(self._rank, self._schedule.slices)))
        jobs = self._jobs(first)
        if not self._source.num_workers:
            return start_fetcher(self._source, jobs, ahead)
        self._loader = self._loader or Loader(self._source, ahead)
        return InProcesses(self._loader, jobs)

    def _new_order(self) -> EpochOrder:
        source, schedule = self._source, self._schedule
        shuffle = schedule.shuffle and source.shuffle
        return EpochOrder(
            source.num_positions, schedule.position.seed, shuffle, source.order, batch_size=schedule.batch_size
        )

    def _jobs(self, first: Plan) -> Iterator[Job]:
        """Those of this worker, from the step `first` on."""
        rows, division = self._new_order(), self._division  # of its own, as the prefetch thread walks it
        start = Position(self._schedule.position.seed, first.epoch, first.start)
        schedule = self._schedule._replace(position=start, first_step=first.number)
        for plan in plan_steps(self._source.num_positions, schedule):
            for v in division.share(self._rank, len(plan.bounds)):
                yield self._job(plan, v, rows)

    def _job(self, plan: Plan, v: int, rows: EpochOrder) -> Job:
        low, high = plan.bounds[v]
        key = slice_key(self._schedule.position.seed, plan.number, v, "fetch") if self._draws else 0
        return Job(plan.number, v, rows.rows(plan.epoch, plan.start + low, plan.start + high), key)


class SharedFilesFeed(RowFeed):
    """Steps over files that not every worker has; rows are sent before a step is given out.

    The exchange happens in the thread that runs the steps: only there do all workers come by in the same order. A
    worker without a slice of its own takes part too.
    """

    def __init__(
        self, source: RowSource, schedule: Schedule, rank: int, division: Division, exchange: RowExchange
    ) -> None:
        super().__init__(source, schedule, rank, division)
        self._exchange = exchange
        self._plan: Plan | None = None
        self._taken: dict[int, Callable[[], Any]] = {}

    def plans(self) -> Iterator[Plan]:
        for plan in super().plans():
            shares = self._division.shares(len(plan.bounds))
            wanted = [[self._job(plan, v, self._order).rows for v in share] for share in shares]
            batches = self._source.take_together(wanted, self._exchange, f"data/step {plan.number}")
            self._plan, self._taken = plan, dict(zip(shares[self._rank], batches, strict=True))
            yield plan

    def get(self, plan: Plan, v: int) -> Any:
        return fetch_now(lambda _job: self._taken[v](), self._job(plan, v, self._order))

    def again(self, plan: Plan, v: int) -> Any:
        return self.get(plan, v) if plan is self._plan and v in self._taken else super().again(plan, v)


def start_fetcher(source: RowSource, jobs: Iterator[Job], ahead: int) -> Fetcher:
    """Whoever in this process may fetch from this source; `ahead` slices may be fetched before they are asked for."""
    if source.fetched_by == "thread":
        return InThread(source.take_job, jobs, ahead)
    return InCaller(source.take_job, jobs, draws=source.fetched_by == "caller")
