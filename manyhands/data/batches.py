"""A strategy's view of the data: an iterator of `Step`s, each with the `FetchedSlice`s that this worker computes.

Every worker sees every step, even one in which it has no slice. `sample_order` decides which rows a step uses,
`sources` reads them, `feeds` and `fetchers` read them ahead. Start reading at `Batches`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils._pytree as pytree

from manyhands.data.feeds import BatchSchedule, Feed, RowFeed, SharedFilesFeed, StepPlan, total_steps
from manyhands.data.randomness import torch_randomness
from manyhands.data.row_exchange import RowExchange
from manyhands.data.sample_order import Position, SliceDivision, slice_key
from manyhands.data.sources.as_source import Source
from manyhands.data.sources.per_slice_source import PerSliceFeed, PerSliceSource, PerSliceStreamFeed
from manyhands.data.sources.row_source import RowSource
from manyhands.data.sources.stream_source import LoadedStreamFeed, StreamFeed, StreamSource
from manyhands.data.trial_feeds import HeldFeed
from manyhands.errors import DataError

__all__ = ["Batches", "FetchedSlice", "Step", "accelerator", "endless", "floats_as", "to_device"]


class FetchedSlice:
    """One slice, fetched: `batch` has `rows` examples, collated and on the worker's device."""

    __slots__ = ("batch", "index", "key", "rows", "step")

    def __init__(self, index: int, batch: Any, rows: int, key: int, step: int) -> None:
        self.index, self.batch, self.rows, self.key, self.step = index, batch, rows, key, step

    def randomness(self) -> AbstractContextManager[None]:
        """Inside, what a model draws from torch is a function of (seed, step, slice)."""
        return torch_randomness(self.key)


class Step:
    """One global batch: `rows` rows from position `start` of the epoch's order, cut into slices at `bounds`.

    `number` counts the run's steps from 1, `epoch` counts from 0; `load_s` is how many seconds it took to fetch this
    worker's slices. With `fetched_together` it began with an exchange of rows, which all workers wait for.
    """

    __slots__ = (
        "_batches",
        "_fetched",
        "_plan",
        "bounds",
        "epoch",
        "fetched_together",
        "last_of_epoch",
        "load_s",
        "num_slices",
        "number",
        "rows",
        "shares",
        "start",
    )

    def __init__(self, batches: Batches, plan: StepPlan) -> None:
        self._batches, self._plan, self._fetched = batches, plan, dict[int, Any]()
        self.number, self.epoch, self.start, self.rows, self.bounds, self.last_of_epoch = plan
        self.num_slices = len(plan.bounds)
        self.shares, self.fetched_together = batches.division.shares(len(plan.bounds)), batches.fetched_together
        self.load_s = 0.0

    @property
    def indices(self) -> list[int]:
        """The slices this worker computes; none if there are more workers than slices."""
        mine = self.shares[self._batches.rank]
        return [v for v in mine if self.bounds[v][0] < self.bounds[v][1]]

    @property
    def last(self) -> bool:
        """Whether no step follows it directly: it is the last of its epoch, or of the requested steps."""
        return self.last_of_epoch or self.number == self._batches.total_steps

    @property
    def after(self) -> Position:
        """The position where a run that has done this step continues."""
        seed = self._batches.schedule.position.seed
        if self.last_of_epoch:
            return Position(seed, self.epoch + 1, 0)
        return Position(seed, self.epoch, self.start + self.rows)

    def fetch(self, since: float) -> None:
        """Fetch this worker's slices, once and in the order of steps: some were read ahead. It began at `since`."""
        # Rows that were exchanged are here already: collating them is this worker's own time, not waiting for others.
        if not self.fetched_together:
            self._fetched = {v: self._batches.feed.get(self._plan, v) for v in self.indices}
        self.load_s = time.perf_counter() - since

    def mine(self) -> Iterator[FetchedSlice]:
        """This worker's slices, in slice order. A second call fetches them again."""
        return map(self.slice, self.indices)

    def slice(self, v: int) -> FetchedSlice:
        """Any slice of the step, also of other workers; fetched now, unless it is this worker's and not yet used."""
        plan, batches = self._plan, self._batches
        batch = self._fetched.pop(v) if v in self._fetched else batches.feed.again(plan, v)
        if batches.device is not None:
            batch = to_device(batch, batches.device)
        if batches.floats is not None:
            batch = floats_as(batch, batches.floats)
        low, high = plan.bounds[v]
        key = slice_key(batches.schedule.position.seed, plan.number, v, "compute")
        return FetchedSlice(v, batch, high - low, key, plan.number)


class Batches:
    """An iterator of steps, starting at the schedule's position, with the slices that `division` gives this rank.

    With `floats`, the floating tensors of a batch have that dtype.
    """

    def __init__(
        self,
        source: Source,
        schedule: BatchSchedule,
        rank: int,
        division: SliceDivision,
        *,
        device: torch.device | str | None = None,
        floats: torch.dtype | None = None,
        exchange: RowExchange | None = None,
    ) -> None:
        if not (isinstance(source, StreamSource) and source.batched):  # the user's batches may differ in size
            _check_size(schedule.batch_size, schedule.slices)
        _check_end(schedule, source)
        _check_position(source, schedule.position)
        self.schedule, self.rank, self.division = schedule, rank, division
        self.fetched_together = isinstance(source, RowSource) and source.shared
        self.device, self.floats = accelerator(device), floats
        self.num_rows = (source.num_positions if isinstance(source, RowSource) else source.num_rows) or 0
        """Rows of an epoch; 0 for a stream."""
        self.steps_per_epoch: int | None = None
        self.total_steps: int | None = schedule.steps
        """None if it is known only when the data ends."""
        self.feed: Feed = self._open(source, exchange)
        self._plans = self.feed.plans()

    def _open(self, source: Source, exchange: RowExchange | None) -> Feed:
        arguments = (self.schedule, self.rank, self.division)
        if isinstance(source, StreamSource):
            return LoadedStreamFeed(source, *arguments) if source.num_workers else StreamFeed(source, *arguments)
        if isinstance(source, PerSliceSource):
            if source.lengths is None:
                return PerSliceStreamFeed(source, *arguments)
            per_slice = PerSliceFeed(source, *arguments)
            self.steps_per_epoch, self.total_steps = per_slice.steps_per_epoch, per_slice.total_steps
            return per_slice
        self.steps_per_epoch = -(-source.num_positions // self.schedule.batch_size)
        self.total_steps = total_steps(source.num_positions, self.schedule)
        if source.shared:
            assert exchange is not None, "files that some workers lack need an exchange"
            return SharedFilesFeed(source, *arguments, exchange)
        return RowFeed(source, *arguments)

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        started = time.perf_counter()
        plan = next(self._plans, None)  # a stream is read here
        if plan is None:
            self.close()
            raise StopIteration
        step = Step(self, plan)
        step.fetch(started)
        return step

    def at(self, number: int) -> Step:
        """Any step, out of order; its slices are fetched on request. Only for data with row numbers."""
        assert isinstance(self.feed, RowFeed | HeldFeed)
        return Step(self, self.feed.plan_at(number))

    @property
    def how_far(self) -> int:
        """How many leases to announce ahead with `expect`; 0: none."""
        return self.feed.how_far if isinstance(self.feed, RowFeed) else 0

    def expect(self, leases: Iterable[tuple[int, int]], *, whole: bool) -> None:
        """Fetch ahead the slices that steps from `at` will probably request; with `whole`, all slices of each step."""
        assert isinstance(self.feed, RowFeed)
        plans = [(self.feed.plan_at(number), v) for number, v in leases]
        self.feed.expect([(plan, v) for plan, one in plans for v in (range(len(plan.bounds)) if whole else [one])])

    def replace_feed(self, make: Callable[[Feed], Feed]) -> None:
        """Before the first step, take its steps and slices from another feed, made of this one."""
        self.feed = make(self.feed)
        self._plans = self.feed.plans()

    def divide(self, division: SliceDivision) -> None:
        """Use this division from the next step on. Every worker calls this between the same two steps."""
        if division != self.division:
            self.division = division
            self.feed.divide(division)

    def close(self) -> None:
        """End threads and loader processes. Called automatically after the last step, and on garbage collection."""
        self.feed.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # When the interpreter exits, what `close` needs may be gone already, including this module's globals; threads
        # and loader processes end with the interpreter.
        if hasattr(self, "feed") and not is_finalizing():
            self.close()


def _check_size(batch_size: int, slices: int) -> None:
    if batch_size < slices:
        raise DataError(
            f"batch_size is {batch_size}, but every batch is cut into {slices} slices, each of one row or more.",
            fix=[f"batch_size={slices}", f"slices={max(1, batch_size)}"],
        )


def _check_end(schedule: BatchSchedule, source: Source) -> None:
    if schedule.epochs is not None and source.endless:
        raise endless()
    if schedule.epochs is None and schedule.steps is None:
        raise DataError("Neither epochs nor steps is given, so the run has no end.", fix=["epochs=1", "steps=1000"])


def endless() -> DataError:
    return DataError(
        "The Dataset repeats without an end, so it has no epochs, and no evaluation could end.",
        where="repeat",
        fix=["steps=1000 in place of epochs=", "no repeat() at its end: epochs=3 repeats it three times"],
    )


def _check_position(source: Source, position: Position) -> None:
    available = source.num_positions if isinstance(source, RowSource) else source.num_rows
    if available is not None and position.row >= available:
        raise DataError(
            f"The run had used {position.row} rows of epoch {position.epoch + 1}, but the data has {available}.",
            fix=["the data that the run was started with", 'resume="never", to start over'],
        )


def accelerator(device: torch.device | str | None) -> torch.device | None:
    """The device that batches must be moved to, if any: they are created on the CPU."""
    return None if device is None or torch.device(device).type == "cpu" else torch.device(device)


def floats_as(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with every floating tensor in this dtype; everything else unchanged."""
    return pytree.tree_map_only(torch.Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, batch)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on the device; structure and everything else unchanged."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        items = [to_device(value, device) for value in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch.to(device) if hasattr(batch, "to") else batch
