"""Prefetches slices for workers that lease them: slices may be requested in any order, or not at all.

`feeds` knows the order of its requests far ahead; here a worker learns of a few leases at a time, and some of them may
be granted to other workers. A batch depends on its request only, so a slice that was not expected is fetched when it is
leased. As in `feeds`, loader processes fetch, or a thread if no user code runs; otherwise nothing is fetched ahead.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from manyhands.data.fetchers import SliceRequest, failed_here
from manyhands.data.loader_processes import (
    UNSENDABLE,
    LoaderError,
    LoaderFailure,
    begin_process,
    cannot_be_sent,
    fetch_failed,
    is_gone,
    is_late,
)
from manyhands.data.loader_spawn import LoaderContext
from manyhands.data.randomness import seed_all
from manyhands.data.sources.row_source import RowSource
from manyhands.errors import DataFetchFailed

__all__ = ["LeasePrefetch", "how_far"]

MIN_AHEAD = 2


def how_far(source: RowSource) -> int:
    """How many leases to announce beyond the current one: 0 if nothing is fetched ahead."""
    if source.num_workers:
        return max(MIN_AHEAD, source.num_workers)
    return MIN_AHEAD if source.fetched_by == "thread" else 0


class LeasePrefetch:
    """`want` sets which slices are fetched; others are dropped, so memory is bounded by what is wanted."""

    def __init__(self, source: RowSource) -> None:
        self._executor, self._fetch = _in_processes(source) if source.num_workers else _in_a_thread(source)
        self._is_stuck = False
        self._timeout_s = source.loader_timeout_s if source.num_workers else None
        self._futures: dict[tuple[int, int], tuple[SliceRequest, Future[Any]]] = {}

    def want(self, jobs: Sequence[SliceRequest]) -> None:
        """Fetch these from now on, most urgent first. Other fetched slices are dropped."""
        wanted = {(job.step, job.v): job for job in jobs}
        for key in self._futures.keys() - wanted.keys():
            self._futures.pop(key)[1].cancel()
        for key, job in wanted.items():
            if key not in self._futures:
                self._futures[key] = job, self._submit(job)

    def has(self, step: int, v: int) -> bool:
        return (step, v) in self._futures

    def take(self, step: int, v: int) -> Any:
        """The batch, once: a second call has to fetch it again. Waits; raises `DataFetchFailed`."""
        job, future = self._futures.pop((step, v))
        try:
            batch = future.result(self._timeout_s)
        except BrokenProcessPool as error:
            raise is_gone(error) from error
        except TimeoutError as error:
            if future.done() or self._timeout_s is None:  # raised by the dataset
                raise failed_here(job, error) from error
            self._is_stuck = True
            raise is_late(self._timeout_s) from error
        except DataFetchFailed:
            raise
        except Exception as error:  # also for a batch that was fetched but could not be sent
            raise fetch_failed(job, LoaderFailure(error)) from error
        if isinstance(batch, LoaderFailure):
            raise fetch_failed(job, batch) from LoaderError(batch.trace)
        return batch

    def close(self) -> None:
        """End the thread or the processes when they finish the current slice; kill processes that are stuck."""
        self._futures.clear()
        if self._is_stuck:
            for process in list(getattr(self._executor, "_processes", {}).values()):
                process.kill()
        self._executor.shutdown(cancel_futures=True)

    def _submit(self, job: SliceRequest) -> Future[Any]:
        try:
            return self._executor.submit(self._fetch, job)
        except BrokenProcessPool as error:
            raise is_gone(error) from error
        except UNSENDABLE as error:
            raise cannot_be_sent(error) from error


def _in_a_thread(source: RowSource) -> tuple[Executor, Callable[[SliceRequest], Any]]:
    return ThreadPoolExecutor(1, "manyhands-prefetch"), source.take_job


def _in_processes(source: RowSource) -> tuple[Executor, Callable[[SliceRequest], Any]]:
    """Spawned, as a fork of a process with threads may hang; they end with this process, even if it is killed."""
    sent = copy.copy(source)
    executor = ProcessPoolExecutor(source.num_workers, LoaderContext(), _begin, (sent, os.getpid()))
    return executor, _fetch


# In a loader process: the source it reads. It is sent once, when the process starts, not with every request.
_source: RowSource | None = None


def _begin(source: RowSource, parent: int) -> None:
    global _source
    begin_process(parent)
    torch.set_num_threads(1)
    _source = source


def _fetch(job: SliceRequest) -> Any:
    assert _source is not None
    seed_all(job.key)
    try:
        return _source.take(job.rows)
    except Exception as error:
        return LoaderFailure(error)
