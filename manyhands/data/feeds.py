"""From a position to steps and their batches, for data with row numbers. Streams have their own feed (`stream_source`).

`plan_steps` makes all decisions: pure, possibly endless, the same on every worker. `RowFeed` fetches the slices in that
order. `batches` is a strategy's view of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from manyhands.data.custom_orders import Order
from manyhands.data.fetchers import CallerFetcher, Fetcher, SliceRequest, ThreadFetcher, fetch_now
from manyhands.data.lease_prefetch import LeasePrefetch, how_far
from manyhands.data.loader_processes import Loader, ProcessFetcher
from manyhands.data.row_exchange import RowExchange
from manyhands.data.sample_order import Position, SliceDivision, num_slices, order, slice_bounds, slice_key
from manyhands.data.sources.row_source import RowSource

__all__ = [
    "STEPS_AHEAD",
    "BatchSchedule",
    "Bounds",
    "EpochOrder",
    "Feed",
    "RowFeed",
    "SharedFilesFeed",
    "StepPlan",
    "cut",
    "start_fetcher",
    "total_steps",
]

STEPS_AHEAD = 2
# The order is computed for this many rows at a time: for a batch of 64 alone the fixed cost would be 100 microseconds.
_ORDER_BLOCK = 32768

Bounds = tuple[tuple[int, int], ...]


class BatchSchedule(NamedTuple):
    """What all workers of a run agree on."""

    batch_size: int
    slices: int
    position: Position
    first_step: int = 1
    """Its number, at `position`."""
    epochs: int | None = None
    steps: int | None = None
    """Of the whole run, those before `position` included."""
    shuffle: bool = True


class StepPlan(NamedTuple):
    """One step, before anything is fetched: rows [start, start + rows) of the epoch's order, cut at `bounds`."""

    number: int
    epoch: int
    start: int
    rows: int
    bounds: Bounds
    last_of_epoch: bool


class Feed(Protocol):
    def plans(self) -> Iterator[StepPlan]: ...

    def get(self, plan: StepPlan, v: int) -> Any:
        """The batch of one of this worker's slices, in order."""

    def again(self, plan: StepPlan, v: int) -> Any:
        """The batch of any slice of a step, at any time, even after `close`; may be slow."""

    def divide(self, division: SliceDivision) -> None:
        """Use this division from the next step on. Every worker calls this between the same two steps."""

    def close(self) -> None: ...


@functools.lru_cache(maxsize=64)
def cut(rows: int, slices: int, short: bool) -> Bounds:
    return tuple(slice_bounds(rows, num_slices(rows, slices, short=short)))


def plan_steps(num_rows: int, schedule: BatchSchedule) -> Iterator[StepPlan]:
    """The steps, starting at the schedule's position."""
    batch_size, number = schedule.batch_size, schedule.first_step
    epoch, start = schedule.position.epoch, schedule.position.row
    while schedule.epochs is None or epoch < schedule.epochs:
        while start < num_rows:
            if schedule.steps is not None and number > schedule.steps:
                return
            rows = min(batch_size, num_rows - start)
            bounds = cut(rows, schedule.slices, rows < batch_size)
            yield StepPlan(number, epoch, start, rows, bounds, start + rows == num_rows)
            number, start = number + 1, start + rows
        epoch, start = epoch + 1, 0


def plan_at(num_rows: int, schedule: BatchSchedule, number: int) -> StepPlan:
    """The step that `plan_steps` yields for this number, computed directly."""
    batch_size, position = schedule.batch_size, schedule.position
    epoch, start = position.epoch, position.row + (number - schedule.first_step) * batch_size
    if start >= num_rows:
        beyond = number - schedule.first_step - -(-(num_rows - position.row) // batch_size)
        per_epoch = -(-num_rows // batch_size)
        epoch, start = epoch + 1 + beyond // per_epoch, beyond % per_epoch * batch_size
    rows = min(batch_size, num_rows - start)
    bounds = cut(rows, schedule.slices, rows < batch_size)
    return StepPlan(number, epoch, start, rows, bounds, start + rows == num_rows)


def total_steps(num_rows: int, schedule: BatchSchedule) -> int | None:
    """Steps of the whole run, those before the position included; None for a run without an end."""
    if schedule.epochs is None:
        return schedule.steps
    position, batch_size = schedule.position, schedule.batch_size
    later_epochs = max(0, schedule.epochs - position.epoch - 1) * -(-num_rows // batch_size)
    this_epoch = -(-(num_rows - position.row) // batch_size) if position.epoch < schedule.epochs else 0
    total = schedule.first_step - 1 + this_epoch + later_epochs
    return total if schedule.steps is None else min(total, schedule.steps)


class EpochOrder:
    """`order`, or an order that the user chose, computed in blocks and cached; one object per thread."""

    def __init__(
        self, num_rows: int, seed: int, shuffle: bool, chosen: Order | None = None, batch_size: int = 1
    ) -> None:
        """`num_rows`: number of positions in an epoch."""
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
    """Steps over data with row numbers; this worker's slices are fetched ahead if the source allows it."""

    def __init__(self, source: RowSource, schedule: BatchSchedule, rank: int, division: SliceDivision) -> None:
        self._source, self._schedule, self._rank, self._division = source, schedule, rank, division
        self._order = self._new_order()
        self._draws = source.fetched_by == "caller"
        self._fetcher: Fetcher | None = None
        self._loader: Loader | None = None
        self._ahead: LeasePrefetch | None = None

    def plans(self) -> Iterator[StepPlan]:
        return plan_steps(self._source.num_positions, self._schedule)

    def plan_at(self, number: int) -> StepPlan:
        return plan_at(self._source.num_positions, self._schedule, number)

    def get(self, plan: StepPlan, v: int) -> Any:
        if self._source.fetched_by == "memory":
            return fetch_now(self._source.take_job, self._job(plan, v, self._order), draws=False)
        if self._fetcher is None:
            self._fetcher = self._start_fetching(plan)  # only now, so that creating a feed starts no thread
        return self._fetcher.get(plan.number, v)

    def again(self, plan: StepPlan, v: int) -> Any:
        if self._ahead is not None and self._ahead.has(plan.number, v):
            return self._ahead.take(plan.number, v)
        return fetch_now(self._source.take_job, self._job(plan, v, self._order))

    @property
    def how_far(self) -> int:
        """How many leases to announce ahead."""
        return how_far(self._source)

    def expect(self, wanted: Sequence[tuple[StepPlan, int]]) -> None:
        """Fetch these ahead of `again`, which will request some of them, and no others."""
        if self._ahead is None:
            self._ahead = LeasePrefetch(self._source)
        self._ahead.want([self._job(plan, v, self._order) for plan, v in wanted])

    def divide(self, division: SliceDivision) -> None:
        """Prefetched slices may belong to another worker now, and are dropped. Loader processes stay."""
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

    def _start_fetching(self, first: StepPlan) -> Fetcher:
        ahead = STEPS_AHEAD * max(1, len(self._division.share(self._rank, self._schedule.slices)))
        jobs = self._jobs(first)
        if not self._source.num_workers:
            return start_fetcher(self._source, jobs, ahead)
        self._loader = self._loader or Loader(self._source, ahead)
        return ProcessFetcher(self._loader, jobs)

    def _new_order(self) -> EpochOrder:
        source, schedule = self._source, self._schedule
        shuffle = schedule.shuffle and source.shuffle
        return EpochOrder(
            source.num_positions, schedule.position.seed, shuffle, source.order, batch_size=schedule.batch_size
        )

    def _jobs(self, first: StepPlan) -> Iterator[SliceRequest]:
        """This worker's requests, starting at the step `first`."""
        rows, division = self._new_order(), self._division  # a separate order, as the prefetch thread uses it
        start = Position(self._schedule.position.seed, first.epoch, first.start)
        schedule = self._schedule._replace(position=start, first_step=first.number)
        for plan in plan_steps(self._source.num_positions, schedule):
            for v in division.share(self._rank, len(plan.bounds)):
                yield self._job(plan, v, rows)

    def _job(self, plan: StepPlan, v: int, rows: EpochOrder) -> SliceRequest:
        low, high = plan.bounds[v]
        key = slice_key(self._schedule.position.seed, plan.number, v, "fetch") if self._draws else 0
        return SliceRequest(plan.number, v, rows.rows(plan.epoch, plan.start + low, plan.start + high), key)


class SharedFilesFeed(RowFeed):
    """Steps over files that not every worker has; workers exchange rows before a step is yielded.

    The exchange runs in the thread that runs the steps: only there do all workers make the same calls in the same
    order. A worker without a slice calls it too.
    """

    def __init__(
        self, source: RowSource, schedule: BatchSchedule, rank: int, division: SliceDivision, exchange: RowExchange
    ) -> None:
        super().__init__(source, schedule, rank, division)
        self._exchange = exchange
        self._plan: StepPlan | None = None
        self._taken: dict[int, Callable[[], Any]] = {}

    def plans(self) -> Iterator[StepPlan]:
        for plan in super().plans():
            shares = self._division.shares(len(plan.bounds))
            wanted = [[self._job(plan, v, self._order).rows for v in share] for share in shares]
            batches = self._source.take_together(wanted, self._exchange, f"data/step {plan.number}")
            self._plan, self._taken = plan, dict(zip(shares[self._rank], batches, strict=True))
            yield plan

    def get(self, plan: StepPlan, v: int) -> Any:
        return fetch_now(lambda _job: self._taken[v](), self._job(plan, v, self._order))

    def again(self, plan: StepPlan, v: int) -> Any:
        return self.get(plan, v) if plan is self._plan and v in self._taken else super().again(plan, v)


def start_fetcher(source: RowSource, jobs: Iterator[SliceRequest], ahead: int) -> Fetcher:
    """A fetcher in this process that the source allows; it may fetch `ahead` slices before they are requested."""
    if source.fetched_by == "thread":
        return ThreadFetcher(source.take_job, jobs, ahead)
    return CallerFetcher(source.take_job, jobs, draws=source.fetched_by == "caller")
