"""Tracks how fast the workers are: reports slow ones, and with `balance` moves their slices to faster ones.

Every worker receives the times of all workers with every step (`StepStats.times`), so all keep the same window and
decide the same. The decisions are pure functions in `parallel.replicas.straggler_detection`. Start reading at
`StragglerTracker.add`.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

from manyhands.data.sample_order import SliceDivision
from manyhands.errors import ManyhandsError
from manyhands.events import Divided, Straggler
from manyhands.parallel.replicas.straggler_detection import Slow, better_parts, paces_of, slow_workers
from manyhands.spec.run import TrainSection
from manyhands.training.worker.worker import Worker

__all__ = ["StragglerTracker", "StragglerVerdict", "report_pace"]


# How long the chief waits for a slow worker on another host to send its host name.
HOST_NAME_TIMEOUT_S = 2.0


def report_pace(worker: Worker, step: int, verdict: StragglerVerdict) -> None:
    """Called by all workers: the chief emits the events, and slow workers on other hosts send it their host name."""
    for slow in verdict.slow:
        _report_slow(worker, step, slow, is_over=False)
    for slow in verdict.keeps_up:
        _report_slow(worker, step, slow, is_over=True)
    if verdict.parts is not None:
        worker.events.emit(Divided(time_s=time.time(), step=step, slices=list(verdict.parts)))


def _report_slow(worker: Worker, step: int, slow: Slow, *, is_over: bool) -> None:
    # Times are compared between replicas; where a replica has several workers, its number is not a rank.
    rank = worker.rank_in(slow.rank)
    host = _host_name(worker, rank)
    if worker.is_chief:
        worker.events.emit(
            Straggler(
                time_s=time.time(),
                rank=rank,
                host=host,
                phase=slow.phase,
                factor=slow.factor,
                step=step,
                waiting=slow.waiting,
                is_over=is_over,
                generation=worker.group.generation,
            )
        )


def _host_name(worker: Worker, rank: int) -> str:
    """The host name of a rank, for the chief; a rank on another host sends it here."""
    hosts = worker.group.hosts
    if hosts[rank] == hosts[0]:
        return socket.gethostname()
    key = f"host name/{worker.group.generation}/{hosts[rank]}"
    with contextlib.suppress(ManyhandsError):  # then only the name is missing
        if worker.rank == rank:
            worker.session.set(key, socket.gethostname().encode())
        elif worker.is_chief:
            return worker.session.get(key, HOST_NAME_TIMEOUT_S).decode()
    return f"host {hosts[rank]}"


# Slices move only if that shortens the slowest worker's time in a step by at least this fraction.
LEAST_GAIN = 0.1
# A slow worker is reported again when its slowdown has grown or shrunk by this factor.
REPORT_AGAIN_FACTOR = 1.5


class StragglerVerdict(NamedTuple):
    """What has changed with the last window."""

    slow: list[Slow]
    keeps_up: list[Slow]
    """Workers that are no longer slow, as they were last reported."""
    parts: tuple[int, ...] | None
    """The number of slices of each rank from the next step on, if it changes."""


class StragglerTracker:
    """`division` is the current division of slices; it changes between steps only, and starts even."""

    def __init__(self, settings: TrainSection, world_size: int) -> None:
        self._settings = settings
        self.regrouped(world_size)

    def regrouped(self, world_size: int) -> None:
        """Workers or their ranks have changed: forget all times."""
        self.division = SliceDivision(world_size)
        self._reported: dict[int, Slow] = {}
        self._window: list[Sequence[Sequence[float]]] = []
        self._shares: Sequence[range] = ()

    def add(self, shares: Sequence[range], slices: int, times: Sequence[Sequence[float]]) -> StragglerVerdict | None:
        """Add a finished step whose slices were divided into `shares`; `times` are those of the step before it.

        Only steps with a whole batch, of `slices` slices, in the current division are compared.
        """
        before, self._shares = self._shares, shares
        if not times or not all(map(any, times)) or before != self.division.shares(slices):
            return None
        self._window.append(times)
        if len(self._window) < self._settings.straggler_steps:
            return None
        window, self._window = self._window, []
        return self._judge(window, [len(share) for share in before])

    def _judge(self, window: Sequence[Sequence[Sequence[float]]], slices: Sequence[int]) -> StragglerVerdict | None:
        paces = paces_of(window, slices)
        found = {slow.rank: slow for slow in slow_workers(paces, self._settings.straggler_factor, self._reported)}
        news = [slow for slow in found.values() if _is_news(slow, self._reported.get(slow.rank))]
        gone = [slow for rank, slow in self._reported.items() if rank not in found]
        self._reported = {rank: self._reported[rank] for rank in found if rank in self._reported}
        self._reported |= {slow.rank: slow for slow in news}
        parts = better_parts(paces, LEAST_GAIN) if self._settings.balance else None
        if parts is not None:
            self.division = SliceDivision(len(parts), parts)
        return StragglerVerdict(news, gone, parts) if news or gone or parts else None


def _is_news(slow: Slow, reported: Slow | None) -> bool:
    if reported is None or slow.phase != reported.phase:
        return True
    return not reported.factor / REPORT_AGAIN_FACTOR < slow.factor < reported.factor * REPORT_AGAIN_FACTOR
