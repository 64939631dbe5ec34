"""Feeds of `mh profile`'s trials give the batches of the feeds that they take the place of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from manyhands.data.batches import Batches
from manyhands.data.feeds import BatchSchedule, Feed
from manyhands.data.sample_order import Position, SliceDivision
from manyhands.data.sources.as_source import as_source
from manyhands.data.trial_feeds import HeldFeed, ShareFeed, num_bytes


class Counted(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return torch.full((3,), float(index)), index


def rows(count: int) -> Any:
    """A generator function: a stream."""

    def generate() -> Any:
        for index in range(26):
            yield torch.full((3,), float(index)), index

    return generate


def batches(data: Any, make: Callable[[Feed], Feed] | None = None, rank: int = 0, workers: int = 1) -> Batches:
    schedule = BatchSchedule(8, 4, Position(0, 0, 0), epochs=2)
    found = Batches(as_source(data), schedule, rank, SliceDivision(workers))
    if make is not None:
        found.replace_feed(make)
    return found


def taken(found: Batches) -> list[list[list[int]]]:
    return [[piece.batch[1].tolist() for piece in step.mine()] for step in found]


@pytest.mark.parametrize("data", [Counted(), rows(26), (torch.zeros(26), torch.arange(26))])
def test_held_batches_are_those_of_the_run_and_end_where_asked(data: Any) -> None:
    expected = taken(batches(data))
    held = batches(data, lambda feed: HeldFeed(feed, 6, lambda plan: range(len(plan.bounds)), 1e9))
    if isinstance(data, Counted):
        reads = data.reads
    assert taken(held) == expected[:6]
    if isinstance(data, Counted):
        assert data.reads == reads, "everything was read before the first step"


def test_held_batches_end_where_memory_ends() -> None:
    held = batches(Counted(), lambda feed: HeldFeed(feed, 6, lambda plan: range(len(plan.bounds)), 1.0))
    assert len(taken(held)) == 1
    assert num_bytes({"x": torch.zeros(4), "name": "a"}) == 16


@pytest.mark.parametrize("data", [Counted(), rows(26), (torch.zeros(26), torch.arange(26))])
def test_shares_of_all_workers_together_are_the_whole_batches(data: Any) -> None:
    expected = taken(batches(data))
    begun: list[int] = []
    shares = [taken(share_of(data, rank, begun)) for rank in range(2)]
    assert begun == [0, 1]
    first = next(share_of(data, 1, begun))
    assert first.bounds == ((0, 2), (2, 4)) and first.rows == 4, "a whole step of its own"
    # A short batch of two rows has one slice: nothing for the second worker.
    both = [a + b for a, b in zip(shares[0], _with_gaps(shares[1], expected), strict=True)]
    assert both == expected


def share_of(data: Any, rank: int, begun: list[int]) -> Batches:
    one = batches(data, None, rank, 2)
    one.replace_feed(lambda feed: ShareFeed(feed, rank, SliceDivision(2), lambda: begun.append(rank)))
    one.rank, one.division = 0, SliceDivision(1)
    return one


def _with_gaps(steps: list[list[list[int]]], whole: list[list[list[int]]]) -> list[list[list[int]]]:
    given = iter(steps)
    return [next(given) if len(step) > 1 else [] for step in whole]
