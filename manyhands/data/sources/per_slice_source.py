"""Data per slice, from a function of the input context: slice v of every step is read from v's data.

With known lengths, an epoch uses every row of every slice's data once: a slice whose data is used up is empty until
the longest one is done. With streams there are no epochs: each stream is opened again when it ends, and `steps` ends
the run. With another number of workers the slices stay the same, so results do too.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator
from itertools import accumulate, count, pairwise
from typing import Any

import numpy as np

from manyhands.data.feeds import STEPS_AHEAD, BatchSchedule, EpochOrder, StepPlan, cut
from manyhands.data.fetchers import CallerFetcher, Fetcher, SliceRequest, ThreadFetcher, fetch_now
from manyhands.data.randomness import randomness
from manyhands.data.row_exchange import RowExchange, decode, encode
from manyhands.data.sample_order import SliceDivision, slice_key
from manyhands.data.sources.stream_source import StreamSource
from manyhands.errors import DataError, DataFetchFailed, ManyhandsError

__all__ = ["PerSliceFeed", "PerSliceSource", "PerSliceStreamFeed"]


class PerSliceSource:
    """This worker's slices with their data, and the lengths of all slices' data (None for streams)."""

    own_batch_size = None
    endless = False

    def __init__(self, parts: dict[int, Any], num_slices: int, exchange: RowExchange | None) -> None:
        self.parts, self.num_slices = parts, num_slices
        self.shuffle, self.num_workers = True, 0
        self.loader_batch_size: int | None = None
        self.loader_timeout_s: float | None = None
        lengths = _lengths({v: part.num_rows for v, part in parts.items()}, num_slices, exchange)
        self.lengths = None if None in lengths else [length or 0 for length in lengths]
        if self.lengths is None and any(length is not None for length in lengths):
            raise DataError(
                "Some slices have streams and some have data with a length.", fix=["one kind for all slices"]
            )
        self.num_rows = None if self.lengths is None else sum(self.lengths)


def _lengths(own: dict[int, int | None], num_slices: int, exchange: RowExchange | None) -> list[int | None]:
    known = dict(own)
    if exchange is not None:
        for answer in exchange.all_gather_bytes("data/slices", encode([[v, rows] for v, rows in own.items()])):
            known.update(decode(answer))
    missing = [v for v in range(num_slices) if v not in known]
    if missing:
        raise DataError(
            f"No worker has data for slices {missing} of {num_slices}.",
            fix=["{v: data_of(v) for v in context.slices}"],
        )
    return [known[v] for v in range(num_slices)]


class PerSliceFeed:
    """Steps over per-slice data with lengths."""

    def __init__(self, source: PerSliceSource, schedule: BatchSchedule, rank: int, division: SliceDivision) -> None:
        assert source.lengths is not None
        self._source, self._schedule, self._lengths = source, schedule, source.lengths
        self._sizes = _sizes(source, schedule)
        self._mine = division.share(rank, source.num_slices)
        self._orders = self._new_orders()
        self._fetcher: Fetcher | None = None
        self.steps_per_epoch = max(-(-n // size) for n, size in zip(self._lengths, self._sizes, strict=True))
        self._done_before = self._steps_done(schedule.position.row)

    @property
    def total_steps(self) -> int | None:
        epochs, steps = self._schedule.epochs, self._schedule.steps
        if epochs is None:
            return steps
        left = (epochs - self._schedule.position.epoch) * self.steps_per_epoch - self._done_before
        total = self._schedule.first_step - 1 + max(0, left)
        return total if steps is None else min(total, steps)

    def plans(self) -> Iterator[StepPlan]:
        number, epoch, k = self._schedule.first_step, self._schedule.position.epoch, self._done_before
        last = self.total_steps
        while last is None or number <= last:
            edges = [0, *accumulate(stop - start for start, stop in self._ranges(k))]
            bounds = tuple(pairwise(edges))
            yield StepPlan(number, epoch, self._rows_before(k), edges[-1], bounds, k + 1 == self.steps_per_epoch)
            number, k = number + 1, k + 1
            if k == self.steps_per_epoch:
                epoch, k = epoch + 1, 0

    def get(self, plan: StepPlan, v: int) -> Any:
        if self._fetcher is None:
            threaded = all(part.fetched_by != "caller" for part in self._source.parts.values())
            jobs = self._jobs()
            ahead = STEPS_AHEAD * max(1, len(self._mine))
            self._fetcher = ThreadFetcher(self._take, jobs, ahead) if threaded else CallerFetcher(self._take, jobs)
        return self._fetcher.get(plan.number, v)

    def again(self, plan: StepPlan, v: int) -> Any:
        if v not in self._source.parts:
            raise DataError(f"Slice {v} has separate data, which this worker was not given.")
        return fetch_now(self._take, self._job(plan, v, self._orders))

    def divide(self, division: SliceDivision) -> None:
        raise _cannot_divide()

    def close(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()

    def _ranges(self, k: int) -> list[tuple[int, int]]:
        """Per slice, the positions in its order that step k of an epoch uses."""
        pairs = zip(self._lengths, self._sizes, strict=True)
        return [(min(n, k * size), min(n, (k + 1) * size)) for n, size in pairs]

    def _rows_before(self, k: int) -> int:
        return sum(start for start, _ in self._ranges(k))

    def _steps_done(self, row: int) -> int:
        k = bisect.bisect_left(range(self.steps_per_epoch), row, key=self._rows_before)
        if self._rows_before(k) != row:
            raise DataError(
                f"The run stopped after {row} rows of its epoch, where no step of this batch size ends.",
                fix=["the batch_size and data that the run was started with"],
            )
        return k

    def _take(self, job: SliceRequest) -> Any:
        return self._source.parts[job.v].take(job.rows)

    def _new_orders(self) -> dict[int, EpochOrder]:
        seed, shuffle = self._schedule.position.seed, self._schedule.shuffle and self._source.shuffle
        return {
            v: EpochOrder(part.num_rows, slice_key(seed, 0, v, "fetch"), shuffle and part.shuffle)
            for v, part in self._source.parts.items()
        }

    def _jobs(self) -> Iterator[SliceRequest]:
        orders = self._new_orders()
        for plan in self.plans():
            for v in self._mine:
                low, high = plan.bounds[v]
                if low < high:
                    yield self._job(plan, v, orders)

    def _job(self, plan: StepPlan, v: int, orders: dict[int, EpochOrder]) -> SliceRequest:
        start, stop = self._ranges(self._steps_done(plan.start))[v]
        key = slice_key(self._schedule.position.seed, plan.number, v, "fetch")
        return SliceRequest(plan.number, v, orders[v].rows(plan.epoch, start, stop), key)


class PerSliceStreamFeed:
    """Steps over one stream per slice; endless."""

    def __init__(self, source: PerSliceSource, schedule: BatchSchedule, rank: int, division: SliceDivision) -> None:
        if schedule.steps is None:
            raise DataError("Slices with separate streams have no epochs, so the run has no end.", fix=["steps=1000"])
        self._source, self._schedule, self._sizes = source, schedule, _sizes(source, schedule)
        self._mine = division.share(rank, source.num_slices)
        self._rows: dict[int, list[Any]] = {}
        self._plan: StepPlan | None = None

    def plans(self) -> Iterator[StepPlan]:
        schedule = self._schedule
        streams = {v: _endless(self._source.parts[v]) for v in self._mine}
        done = schedule.position.row // schedule.batch_size
        for number in range(schedule.first_step - done, (schedule.steps or 0) + 1):
            self._rows = {v: self._read(streams[v], v, number) for v in self._mine}
            if number < schedule.first_step:
                continue
            start = (number - schedule.first_step + done) * schedule.batch_size
            bounds = cut(schedule.batch_size, schedule.slices, False)
            self._plan = StepPlan(number, 0, start, schedule.batch_size, bounds, False)
            yield self._plan

    def get(self, plan: StepPlan, v: int) -> Any:
        if plan is not self._plan or v not in self._rows:
            raise DataError(f"Slice {v} of step {plan.number} has a separate stream, which this worker cannot read.")
        low, high = plan.bounds[v]
        key = slice_key(self._schedule.position.seed, plan.number, v, "fetch")
        job = SliceRequest(plan.number, v, np.arange(plan.start + low, plan.start + high), key)
        return fetch_now(functools.partial(self._source.parts[v].collate_job, self._rows[v]), job)

    again = get

    def divide(self, division: SliceDivision) -> None:
        raise _cannot_divide()

    def close(self) -> None:
        pass  # the current step may still be finished

    def _read(self, stream: Iterator[Any], v: int, number: int) -> list[Any]:
        try:
            with randomness(slice_key(self._schedule.position.seed, number, v, "fetch")):
                return [next(stream) for _ in range(self._sizes[v])]
        except ManyhandsError:
            raise
        except Exception as error:
            raise DataFetchFailed(
                f"Reading slice {v} of step {number} from its stream failed. {type(error).__name__}: {error}"
            ) from error


def _cannot_divide() -> ManyhandsError:
    return ManyhandsError("Slices with separate data stay with the workers that were given it.")


def _endless(stream: StreamSource) -> Iterator[Any]:
    for epoch in count():
        empty = True
        for row in stream.open(epoch):
            if empty:
                stream.check_first(row)
            empty = False
            yield row
        if empty:
            raise DataError("The stream of a slice gave no rows.", fix=["at least one row each time it is opened"])


def _sizes(source: PerSliceSource, schedule: BatchSchedule) -> list[int]:
    if source.num_slices != schedule.slices:
        raise ManyhandsError(f"The data was made for {source.num_slices} slices, but the run has {schedule.slices}.")
    return [stop - start for start, stop in cut(schedule.batch_size, schedule.slices, False)]
