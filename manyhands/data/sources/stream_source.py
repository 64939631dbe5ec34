"""Data that can only be read forward: iterable datasets, generator functions, any object that can be iterated again.

Promise: every worker reads the whole stream and keeps the rows of its slices; the order is the stream's, and a resumed
run reads and drops the rows before its position. So every row is used once per epoch if the stream yields the same rows
each time it is opened. Price: every worker reads the whole stream. Randomness is set while the stream is read (keyed by
step) and collated (by slice), so a stream that shuffles has the same order everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from manyhands.data.feeds import STEPS_AHEAD, BatchSchedule, StepPlan, cut
from manyhands.data.fetchers import SliceRequest, fetch_now
from manyhands.data.loader_processes import LoaderError, LoaderFailure, lacks_room, room_fix, start, stream_loader
from manyhands.data.randomness import randomness
from manyhands.data.ready_batches import cannot_tell, cut_rows, may_be_batch, num_rows_of
from manyhands.data.sample_order import SliceDivision, slice_key
from manyhands.data.sources.columns import collate_rows, is_array
from manyhands.data.sources.row_source import Collate
from manyhands.errors import DataError, DataFetchFailed, ManyhandsError

__all__ = ["LoadedStreamFeed", "Opener", "StreamFeed", "StreamSource"]


class StreamSource:
    """A stream that can be opened once per epoch, of rows or, if `batched`, of batches. Its length is not known.

    If `batched` is None its items count as rows, and an item that may be a batch is refused.
    """

    num_rows = None
    shuffle = False

    def __init__(
        self, data: Any, collate: Collate | None, *, num_workers: int = 0, batched: bool | None = None
    ) -> None:
        self._data, self._collate, self.num_workers, self.batched = data, collate, num_workers, batched
        self.loader_batch_size: int | None = None
        self.loader_timeout_s: float | None = None
        self.own_batch_size: int | None = None
        self.endless = False
        self.identity = ""
        """Differs if the order may differ, as far as that is known."""

    def open(self, epoch: int) -> Iterator[Any]:
        if isinstance(self._data, Opener):
            return iter(self._data(epoch))
        if hasattr(self._data, "set_epoch"):
            self._data.set_epoch(epoch)
        return iter(self._data)

    def continued(self, epoch: int, row: int) -> tuple[Iterator[Any], int] | None:
        """The rest of a stream that is open in this process, and how many items are before it; see `KeptStream`.

        None: the stream has to be opened.
        """
        from_row = getattr(self._data, "from_row", None)
        found: tuple[Iterator[Any], int] | None = from_row(epoch, row) if from_row is not None else None
        return found

    def collate(self, rows: list[Any]) -> Any:
        return collate_rows(rows) if self._collate is None else self._collate(rows)

    def collate_job(self, items: list[Any], _job: SliceRequest) -> Any:
        return cut_rows(items[0], 0, num_rows_of(items[0])) if self.batched else self.collate(items)

    def slice_job(self, items: list[Any], low: int, high: int, _job: SliceRequest) -> Any:
        """Rows [low, high) of a step's items."""
        return cut_rows(items[0], low, high) if self.batched else self.collate(items[low:high])

    def items_of(self, rows: int) -> int:
        """How many items make a step or slice of this many rows."""
        return 1 if self.batched else rows

    def count(self, items: list[Any]) -> int:
        """The rows of a step's items."""
        return num_rows_of(items[0]) if self.batched else len(items)

    def check_first(self, item: Any) -> None:
        """`DataError` for an item that may be an example or a batch, if the user has not set `batched`."""
        if self.batched is None and self._collate is None and may_be_batch(item):
            raise cannot_tell(item)


class Opener:
    """A function that returns a new iterable; it gets the epoch if it has a parameter of that name."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], *, takes_epoch: bool) -> None:
        self._function, self._args, self._takes_epoch = function, args, takes_epoch

    def __call__(self, epoch: int) -> Any:
        rows = self._function(*self._args, epoch=epoch) if self._takes_epoch else self._function(*self._args)
        if isinstance(rows, tuple | dict | DataLoader) or is_array(rows) or not hasattr(rows, "__iter__"):
            raise DataError(
                f"A data function without the context yields rows, but this returned a {type(rows).__name__}.",
                fix=["yield each row", "def data(context): ..., to give the whole data", "the data itself"],
            )
        return rows


def read_steps(source: StreamSource, schedule: BatchSchedule) -> Iterator[tuple[StepPlan, list[Any]]]:
    """Every step, starting at the schedule's position, with all its rows."""
    position, batch_size = schedule.position, schedule.batch_size
    epoch, number = position.epoch, schedule.first_step
    # A resumed epoch is read again from its first step, under the same keys, so that its order is the same.
    skip, before = position.row, -(-position.row // batch_size)
    while schedule.epochs is None or epoch < schedule.epochs:
        if schedule.steps is not None and number > schedule.steps:
            return
        reader = _Reader(source, schedule, epoch, number - before)
        reader.skip(skip)
        while not reader.ended and (schedule.steps is None or number <= schedule.steps):
            plan, rows = reader.next_step(number)
            yield plan, rows
            number += 1
        if not reader.ended:
            return
        epoch, skip, before = epoch + 1, 0, 0


class _Reader:
    """One epoch of a stream, read a batch at a time and one row ahead, to know which batch is the last."""

    def __init__(self, source: StreamSource, schedule: BatchSchedule, epoch: int, first_step: int) -> None:
        self._source, self._schedule, self._epoch, self._first_step = source, schedule, epoch, first_step
        self._iterator: Iterator[Any] | None = None
        self._ahead: list[Any] = []
        self._start, self._reads, self.ended = 0, 0, False

    def next_step(self, number: int) -> tuple[StepPlan, list[Any]]:
        schedule, start = self._schedule, self._start
        items = self._read(self._source.items_of(schedule.batch_size), number)
        rows = self._start - start
        # The user's batches have no regular size: only one that cannot fill all slices counts as short.
        short = rows < (schedule.slices if self._source.batched else schedule.batch_size)
        return StepPlan(number, self._epoch, start, rows, cut(rows, schedule.slices, short), self.ended), items

    def skip(self, rows: int) -> None:
        continued = self._source.continued(self._epoch, rows)
        if continued is not None:
            (self._iterator, self._reads), self._start = continued, rows
            return
        number = self._first_step
        while self._start < rows and not self.ended:
            self._read(self._source.items_of(min(self._schedule.batch_size, rows - self._start)), number)
            number += 1
        if self._start > rows:
            raise DataError(
                f"The run had used {rows} rows of epoch {self._epoch + 1}, but a batch of the stream now ends at row "
                f"{self._start}.",
                fix=["a stream that yields the same batches each time it is opened"],
            )
        if self._start < rows or (rows and self.ended):
            raise DataError(
                f"The stream ended after {self._start} rows of epoch {self._epoch + 1}, but {rows} were already used.",
                fix=["a stream that yields the same rows each time it is opened"],
            )

    def _read(self, count: int, number: int) -> list[Any]:
        rows = self._ahead
        try:
            with randomness(self._key(number)):
                if self._iterator is None:
                    self._iterator = self._source.open(self._epoch)
                    rows.append(next(self._iterator))
                    self._source.check_first(rows[0])
                while len(rows) <= count:
                    rows.append(next(self._iterator))
        except StopIteration:
            self.ended = True
        except ManyhandsError:
            raise
        except Exception as error:
            what = "after row" if self._source.batched else "row"
            where = (
                f"Reading {what} {self._start + len(rows)} of the stream, for step {number} of epoch {self._epoch + 1}"
            )
            raise DataFetchFailed(f"{where}, failed. {type(error).__name__}: {error}") from error
        if not rows:
            raise DataError(f"The stream had no rows in epoch {self._epoch + 1}.", fix=["at least one row per epoch"])
        self._ahead, self._reads = rows[count:], self._reads + 1
        self._start += self._source.count(rows[:count])
        return rows[:count]

    def _key(self, number: int) -> int:
        """Key for draws while reading a step; with `batched`, by the count of reads, as step numbers are not known."""
        seed = self._schedule.position.seed
        if self._source.batched:
            return slice_key(slice_key(seed, self._epoch, 0, "fetch"), self._reads, 0, "fetch")
        return slice_key(seed, number, 0, "fetch")


class StreamFeed:
    """Steps over a stream, read in the thread that runs the steps."""

    def __init__(self, source: StreamSource, schedule: BatchSchedule, rank: int, division: SliceDivision) -> None:
        self._source, self._schedule = source, schedule
        self._plan: StepPlan | None = None
        self._rows: list[Any] = []

    def plans(self) -> Iterator[StepPlan]:
        for plan, rows in read_steps(self._source, self._schedule):
            self._plan, self._rows = plan, rows
            yield plan

    def get(self, plan: StepPlan, v: int) -> Any:
        if plan is not self._plan:
            raise ManyhandsError(f"Step {plan.number} of a stream is over; its rows are gone.")
        return collate_slice(self._source, self._schedule, plan, self._rows, v)

    def again(self, plan: StepPlan, v: int) -> Any:
        if plan is self._plan:
            return self.get(plan, v)
        return reread(self._source, self._schedule, plan, v)

    def divide(self, division: SliceDivision) -> None:
        pass  # every worker has read all rows of the step

    def close(self) -> None:
        # After a worker is lost, the others close this and then finish the current step, which still needs its rows.
        pass


class LoadedStreamFeed:
    """Steps over a stream that one loader process reads ahead; it sends this worker's slices only."""

    def __init__(self, source: StreamSource, schedule: BatchSchedule, rank: int, division: SliceDivision) -> None:
        self._source, self._schedule = source, schedule
        self._steps = _StreamSteps(source, schedule, rank, division)
        self._items: Generator[Any, None, None] | None = None
        self._plan: StepPlan | None = None
        self._batches: dict[int, Any] = {}

    def plans(self) -> Iterator[StepPlan]:
        self._items = start(stream_loader(self._steps, STEPS_AHEAD, self._source.loader_timeout_s))
        for item in self._items:
            if isinstance(item, LoaderFailure):
                what = f"{item.message}\n  in the loader process:\n{item.trace.rstrip()}"
                fix = room_fix() if lacks_room(item.message) else ()
                raise DataFetchFailed(what, fix=fix) from LoaderError(item.trace)
            self._plan, self._batches = item
            yield self._plan

    def get(self, plan: StepPlan, v: int) -> Any:
        return self._batches[v]

    def again(self, plan: StepPlan, v: int) -> Any:
        return reread(self._source, self._schedule, plan, v)

    def divide(self, division: SliceDivision) -> None:
        raise ManyhandsError("The process that reads a stream sends one worker's slices, which cannot change.")

    def close(self) -> None:
        if self._items is not None:
            self._items.close()  # it holds the last reference to the loader, and so to the process


class _StreamSteps(IterableDataset[Any]):
    """Runs in the loader process."""

    def __init__(self, source: StreamSource, schedule: BatchSchedule, rank: int, division: SliceDivision) -> None:
        self._source, self._schedule, self._rank, self._division = source, schedule, rank, division

    def __iter__(self) -> Iterator[Any]:
        try:
            for plan, rows in read_steps(self._source, self._schedule):
                mine = self._division.share(self._rank, len(plan.bounds))
                yield plan, {v: collate_slice(self._source, self._schedule, plan, rows, v) for v in mine}
        except Exception as error:
            yield LoaderFailure(error)


def collate_slice(source: StreamSource, schedule: BatchSchedule, plan: StepPlan, rows: list[Any], v: int) -> Any:
    low, high = plan.bounds[v]
    key = slice_key(schedule.position.seed, plan.number, v, "fetch")
    job = SliceRequest(plan.number, v, np.arange(plan.start + low, plan.start + high), key)
    return fetch_now(functools.partial(source.slice_job, rows, low, high), job)


def reread(source: StreamSource, schedule: BatchSchedule, plan: StepPlan, v: int) -> Any:
    """A slice of a step whose rows are gone: reads the epoch again up to it. Slow, but always right."""
    position = type(schedule.position)(schedule.position.seed, plan.epoch, plan.start)
    replay = schedule._replace(position=position, first_step=plan.number, steps=plan.number, epochs=plan.epoch + 1)
    for again, rows in read_steps(source, replay):
        return collate_slice(source, schedule, again, rows, v)
    raise ManyhandsError(f"Step {plan.number} could not be read again.")
