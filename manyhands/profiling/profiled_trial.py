"""How a worker in a trial of `mh profile` differs from one in a run: which data it takes, and that it is recorded.

In a run nothing differs, and all methods return what they are given. Start reading at `ProfiledTrial`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manyhands.data.batches import Batches, Step
from manyhands.data.feeds import StepPlan
from manyhands.data.sample_order import SliceDivision
from manyhands.data.sources.as_source import Source
from manyhands.data.sources.per_slice_source import PerSliceSource
from manyhands.data.sources.row_source import RowSource
from manyhands.data.trial_feeds import HeldFeed, ShareFeed, room_for
from manyhands.errors import TrainingFailed
from manyhands.profiling.step_recorder import StepRecorder
from manyhands.profiling.step_records import WorkerFacts
from manyhands.spec.probe_requests import ProfileOrder, profile_order
from manyhands.strategies.base import StepStats
from manyhands.training.state.training_state import TrainingState
from manyhands.training.worker.worker import Worker

__all__ = ["ProfiledTrial"]

START_TIMEOUT_S = 120.0


class ProfiledTrial:
    def __init__(self, worker: Worker) -> None:
        self._worker, self._order = worker, profile_order() or ProfileOrder()
        self._is_on = profile_order() is not None
        self._loads = "caller", 0

    def loaders(self, asked: int | None) -> int | None:
        """The number of loader processes, where the script asks for so many."""
        return asked if self._order.loaders is None else self._order.loaders

    @property
    def replica(self) -> tuple[int, int]:
        """Whose data this worker takes, and of how many."""
        return self._order.share or (self._worker.replica, self._worker.num_replicas)

    @property
    def most_replicas(self) -> int:
        """Among how many a batch is divided."""
        return self._worker.most_replicas if self._order.share is None else self._order.share[1]

    def division(self, of_run: SliceDivision) -> SliceDivision:
        return of_run if self._order.share is None else SliceDivision(self._order.share[1])

    def batches(self, batches: Batches, source: Source) -> Batches:
        """The batches as the trial wants them: one worker's share of them, or all fetched before the first step."""
        order, leases = self._order, self._worker.strategy.leases
        self._loads = _fetched_by(source), getattr(source, "num_workers", 0)
        if order.share is not None:
            rank, division = batches.rank, batches.division
            batches.replace_feed(lambda feed: ShareFeed(feed, rank, division, lambda: _wait_for_start(order)))
            batches.rank, batches.division = 0, SliceDivision(1)
        if order.data_ready:

            def wanted(plan: StepPlan) -> range:
                count = len(plan.bounds)
                return range(count) if leases else batches.division.share(batches.rank, count)

            room = room_for(self._worker.world_size)
            batches.replace_feed(lambda feed: HeldFeed(feed, order.data_ready, wanted, room))
        return batches

    def observers(self, training: TrainingState) -> list[Callable[[Step, StepStats], None]]:
        """What records the steps of one call."""
        if not self._is_on:
            return []
        recorder = StepRecorder(
            self._order, self._facts(training), self._worker.run_dir, training.model, training.engine
        )
        return [recorder.step_done]

    def _facts(self, training: TrainingState) -> WorkerFacts:
        worker, spec = self._worker, self._worker.resolved.spec
        return WorkerFacts(
            rank=worker.rank,
            workers=worker.world_size,
            wanted_workers=getattr(worker.strategy, "workers", None),
            strategy=worker.strategy.name,
            slices=training.slices,
            threads=worker.threads,
            precision=spec.train.precision,
            reducer=spec.comm.reducer,
            plane=spec.comm.plane,
            sockets_because=worker.why_no_plane,
            divided=worker.is_divided,
            leases=worker.strategy.leases,
            exact=spec.train.exact,
            fetched_by=self._loads[0],
            loaders=self._loads[1],
        )


def _fetched_by(source: Any) -> str:
    """How a worker reads this data: "memory", "thread", "caller", "stream" or "function"."""
    if isinstance(source, RowSource):
        return source.fetched_by
    return "function" if isinstance(source, PerSliceSource) else "stream"


def _wait_for_start(order: ProfileOrder) -> None:
    """All workers that train alone begin together, so that they share the cores as workers of one run do."""
    assert order.share is not None
    gate, (rank, workers) = Path(order.start_gate), order.share
    (gate / f"ready-{rank}").touch()
    give_up_at = time.monotonic() + START_TIMEOUT_S
    while len(list(gate.glob("ready-*"))) < workers:
        if time.monotonic() > give_up_at:
            raise TrainingFailed(f"Not all of {workers} trials began within {START_TIMEOUT_S:g} s.")
        time.sleep(0.005)
