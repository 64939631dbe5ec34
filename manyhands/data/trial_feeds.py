"""Feeds for trials of `mh profile`: data that costs no time, and the share of one worker that trains alone.

Each takes another feed and gives the same batches: `HeldFeed` has fetched them before the first step, `ShareFeed` cuts
every step down to one worker's slices. Start reading at `HeldFeed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.utils._pytree as pytree

from manyhands.data.feeds import Feed, RowFeed, StepPlan
from manyhands.data.sample_order import SliceDivision

__all__ = ["HeldFeed", "ShareFeed", "num_bytes", "room_for"]

PART_OF_MEMORY = 0.25
"""Of the memory that is available, how much all workers of the trial may fill with batches."""


class HeldFeed:
    """The first steps of a feed, all fetched before the first of them; there are no others.

    `wanted` are a step's slices that this worker may ask for. Ends earlier if `room` bytes are full.
    """

    def __init__(self, feed: Feed, steps: int, wanted: Callable[[StepPlan], Iterable[int]], room: float) -> None:
        self._feed, self._held_plans = feed, list[StepPlan]()
        self._batches: dict[tuple[int, int], Any] = {}
        for plan in feed.plans():
            for v in wanted(plan):
                if plan.bounds[v][0] < plan.bounds[v][1]:
                    self._batches[plan.number, v] = batch = feed.get(plan, v)
                    room -= num_bytes(batch)
            self._held_plans.append(plan)
            if len(self._held_plans) >= steps or room <= 0:
                break
        feed.close()  # loader processes that go on fetching would take time from the steps

    def plans(self) -> Iterator[StepPlan]:
        return iter(self._held_plans)

    def plan_at(self, number: int) -> StepPlan:
        assert isinstance(self._feed, RowFeed)
        return self._feed.plan_at(number)

    def get(self, plan: StepPlan, v: int) -> Any:
        found = self._batches.get((plan.number, v))
        return self._feed.again(plan, v) if found is None else found

    again = get

    def divide(self, division: SliceDivision) -> None:
        pass  # `get` has every slice, the held ones at once

    def close(self) -> None:
        self._feed.close()


class ShareFeed:
    """Only the slices of one worker, as whole steps: what it computes in each step, and nothing of the others.

    `feed` fetches for that worker, `rank` of `division`. `wait_for_start` is called before the first step.
    """

    def __init__(self, feed: Feed, rank: int, division: SliceDivision, wait_for_start: Callable[[], None]) -> None:
        self._feed, self._rank, self._division, self._wait = feed, rank, division, wait_for_start
        self._whole: StepPlan | None = None
        self._first = 0

    def plans(self) -> Iterator[StepPlan]:
        self._wait()
        for whole in self._feed.plans():
            share = list(self._division.share(self._rank, len(whole.bounds)))
            bounds = [whole.bounds[v] for v in share]
            if not bounds or bounds[-1][1] == bounds[0][0]:
                continue  # a short batch, of which this worker has nothing
            self._whole, self._first, start = whole, share[0], bounds[0][0]
            own = tuple((low - start, high - start) for low, high in bounds)
            yield whole._replace(rows=own[-1][1], bounds=own)

    def get(self, plan: StepPlan, v: int) -> Any:
        assert self._whole is not None and self._whole.number == plan.number, "one step after the other"
        return self._feed.get(self._whole, self._first + v)

    def again(self, plan: StepPlan, v: int) -> Any:
        assert self._whole is not None and self._whole.number == plan.number, "one step after the other"
        return self._feed.again(self._whole, self._first + v)

    def divide(self, division: SliceDivision) -> None:
        pass  # this worker keeps its share

    def close(self) -> None:
        self._feed.close()


def num_bytes(batch: Any) -> int:
    """Of its tensors and arrays."""
    return sum(int(getattr(leaf, "nbytes", 0)) for leaf in pytree.tree_leaves(batch))


def room_for(workers: int) -> float:
    """Bytes that one of so many workers may hold."""
    import psutil

    return PART_OF_MEMORY * float(psutil.virtual_memory().available) / max(1, workers)
