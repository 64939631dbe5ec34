"""What a strategy sees of data: an iterator of `Step`s, each with the `Piece`s this worker computes.

Every worker sees every step, also one in which it has no piece. Which rows a step takes is `sample_order`; where they
come from is `source`; who reads them ahead is `feeds` and `fetchers`. Start reading at `Batches`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils._pytree as pytree

from manyhands.data.feeds import Feed, Plan, RowFeed, Schedule, SharedFilesFeed, total_steps
from manyhands.data.randomness import torch_randomness
from manyhands.data.row_exchange import RowExchange
from manyhands.data.sample_order import Division, Position, slice_key
from manyhands.data.sources.as_source import Source
from manyhands.data.sources.per_slice_source import ApartFeed, ApartSource, ApartStreamFeed
from manyhands.data.sources.row_source import RowSource
from manyhands.data.sources.stream_source import LoadedStreamFeed, StreamFeed, StreamSource
from manyhands.errors import DataError

__all__ = ["Batches", "Piece", "Step"]


class Piece:
    """One slice, fetched: `batch` holds `rows` examples, collated and on the worker's device."""

    __slots__ = ("batch", "index", "key", "rows", "step")

    def __init__(self, index: int, batch: Any, rows: int, key: int, step: int) -> None:
        self.index, self.batch, self.rows, self.key, self.step = index, batch, rows, key, step

    def randomness(self) -> AbstractContextManager[None]:
        """What a model draws from torch inside is a function of (seed, step, slice)."""
        return torch_randomness(self.key)


class Step:
    """One global batch: `rows` rows from position `start` of the epoch's order, cut into slices at `bounds`.

    `number` counts the run's steps from 1, `epoch` counts from 0; `load_s` is how many seconds this step was blocked in
    fetching, so far. With `fetched_together` that began with an exchange of rows, which all workers wait for.
    """

    __slots__ = (
        "_batches",
        "_given",
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

    def __init__(self, batches: Batches, plan: Plan, load_s: float) -> None:
        self._batches, self._plan, self._given = batches, plan, False
        self.number, self.epoch, self.start, self.rows, self.bounds, self.last_of_epoch = plan
        self.num_slices = len(plan.bounds)
        self.shares, self.fetched_together = batches.division.shares(len(plan.bounds)), batches.fetched_together
        self.load_s = load_s

    @property
    def indices(self) -> list[int]:
        """The slices this worker computes; none where there are more workers than slices."""
        mine = self.shares[self._batches.rank]
        return [v for v in mine if self.bounds[v][0] < self.bounds[v][1]]

    @property
    def last(self) -> bool:
        """Whether no step follows it at once: its epoch ends with it, or the steps that were asked for do."""
        return self.last_of_epoch or self.number == self._batches.total_steps

    @property
    def after(self) -> Position:
        """Where a run that has done this step goes on."""
        seed = self._batches.schedule.position.seed
        if self.last_of_epoch:
            return Position(seed, self.epoch + 1, 0)
        return Position(seed, self.epoch, self.start + self.rows)

    def mine(self) -> Iterator[Piece]:
        """This worker's pieces, in slice order; they were fetched ahead. A second call fetches them again."""
        given, self._given = self._given, True
        for v in self.indices:
            yield self._piece(v, again=given)

    def slice(self, v: int) -> Piece:
        """Any slice of the step, whoever it belongs to; fetched now."""
        return self._piece(v, again=True)

    def _piece(self, v: int, *, again: bool) -> Piece:
        plan, batches = self._plan, self._batches
        started = time.perf_counter()
        batch = batches.feed.again(plan, v) if again else batches.feed.get(plan, v)
        if batches.device is not None:
            batch = to_device(batch, batches.device)
        if batches.floats is not None:
            batch = floats_as(batch, batches.floats)
        self.load_s += time.perf_counter() - started
        low, high = plan.bounds[v]
        key = slice_key(batches.schedule.position.seed, plan.number, v, "compute")
        return Piece(v, batch, high - low, key, plan.number)


class Batches:
    """An iterator of steps from `position` on.

    `steps` counts the whole run's, those before `position` included; `first_step` is the number of the first one here.
    Slices are divided evenly among `world_size` workers, or by `division`. With `floats`, a batch's floating tensors
    are of that type.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        slices: int,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool = True,
        position: Position,
        epochs: int | None = None,
        steps: int | None = None,
        first_step: int = 1,
        device: torch.device | str | None = None,
        floats: torch.dtype | None = None,
        exchange: RowExchange | None = None,
        division: Division | None = None,
    ) -> None:
        if not (isinstance(source, StreamSource) and source.batched):  # those may differ in size
            _check_size(batch_size, slices)
        _check_end(epochs, steps)
        _check_position(source, position, seed)
        self.rank, self.division = rank, division or Division(world_size)
        self.fetched_together = isinstance(source, RowSource) and source.shared
        self.schedule = Schedule(batch_size, slices, position, first_step, epochs, steps, shuffle)
        self.device, self.floats = accelerator(device), floats
        self.num_rows = (source.num_positions if isinstance(source, RowSource) else source.num_rows) or 0
        """That an epoch takes; 0 for a stream."""
        self.steps_per_epoch: int | None = None
        self.total_steps: int | None = steps
        """None where only the data's end can tell."""
        self.feed: Feed = self._open(source, exchange)
        self._plans = self.feed.plans()

    def _open(self, source: Source, exchange: RowExchange | None) -> Feed:
        place = (self.schedule, self.rank, self.division)
        if isinstance(source, StreamSource):
            return LoadedStreamFeed(source, *place) if source.num_workers else StreamFeed(source, *place)
        if isinstance(source, ApartSource):
            if source.lengths is None:
                return ApartStreamFeed(source, *place)
            apart = ApartFeed(source, *place)
            self.steps_per_epoch, self.total_steps = apart.steps_per_epoch, apart.total_steps
            return apart
        self.steps_per_epoch = -(-source.num_positions // self.schedule.batch_size)
        self.total_steps = total_steps(source.num_positions, self.schedule)
        if source.shared:
            assert exchange is not None, "files that some workers lack need an exchange"
            return SharedFilesFeed(source, *place, exchange)
        return RowFeed(source, *place)

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        started = time.perf_counter()
        plan = next(self._plans, None)  # a stream is read here
        if plan is None:
            self.close()
            raise StopIteration
        return Step(self, plan, time.perf_counter() - started)

    def at(self, number: int) -> Step:
        """Any step, out of turn; its slices are fetched when they are asked for. For rows by number."""
        assert isinstance(self.feed, RowFeed)
        return Step(self, self.feed.plan_at(number), 0.0)

    @property
    def how_far(self) -> int:
        """How many leases it is of use to know ahead, for `expect`; 0: none."""
        return self.feed.how_far if isinstance(self.feed, RowFeed) else 0

    def expect(self, leases: Iterable[tuple[int, int]], *, whole: bool) -> None:
        """Have slices fetched ahead that steps from `at` will probably be asked for; with `whole`, all of each step."""
        assert isinstance(self.feed, RowFeed)
        plans = [(self.feed.plan_at(number), v) for number, v in leases]
        self.feed.expect([(plan, v) for plan, one in plans for v in (range(len(plan.bounds)) if whole else [one])])

    def divide(self, division: Division) -> None:
        """Divide the slices of the steps from the next one on like this; every worker says so between the same two."""
        if division != self.division:
            self.division = division
            self.feed.divide(division)

    def close(self) -> None:
        """End threads and loader processes. Happens by itself at the last step, and when nobody holds this any more."""
        self.feed.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # When the interpreter ends, what `close` needs may be gone already, this module's globals included; threads and
        # loader processes end with it.
        if hasattr(self, "feed") and not is_finalizing():
            self.close()


def _check_size(batch_size: int, slices: int) -> None:
    if batch_size < slices:
        raise DataError(
            f"batch_size is {batch_size}, but every batch is cut into {slices} slices, each of one row or more.",
            fix=[f"batch_size={slices}", f"slices={max(1, batch_size)}"],
        )


def _check_end(epochs: int | None, steps: int | None) -> None:
    if epochs is None and steps is None:
        raise DataError("Neither epochs nor steps is given, so the run has no end.", fix=["epochs=1", "steps=1000"])


def _check_position(source: Source, position: Position, seed: int) -> None:
    assert position.seed == seed, f"a position of seed {position.seed} in a run of seed {seed}"
    there = source.num_positions if isinstance(source, RowSource) else source.num_rows
    if there is not None and position.row >= there:
        raise DataError(
            f"The run had used {position.row} rows of epoch {position.epoch + 1}, but the data has {there}.",
            fix=["the data that the run was started with", 'resume="never", to start over'],
        )


def accelerator(device: torch.device | str | None) -> torch.device | None:
    """The device that batches must be moved to, if any: they are made on the CPU."""
    return None if device is None or torch.device(device).type == "cpu" else torch.device(device)


def floats_as(batch: Any, dtype: torch.dtype) -> Any:
    """Every floating tensor of a batch in this type; all else as it is."""
    return pytree.tree_map_only(torch.Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, batch)


def to_device(batch: Any, device: torch.device) -> Any:
    """Every tensor of a batch on the device; structure and everything else as they are."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        items = [to_device(value, device) for value in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch.to(device) if hasattr(batch, "to") else batch
