"""Slices that are fetched before they are asked for, in whatever order they will be: for workers that lease them.

`feeds` knows the order of its jobs long before; here a worker hears of a few at a time, and some of them go to others
in the end. What is fetched is a function of the job alone: whoever is given one that it did not expect fetches it then.
Who fetches is decided as in `feeds`: loader processes, a thread where no user code runs, or else nobody ahead.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from manyhands.data.fetchers import Job, failed_here
from manyhands.data.loader_processes import (
    UNSENDABLE,
    Failure,
    LoaderError,
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

__all__ = ["Ahead", "how_far"]

LEAST_AHEAD = 2


def how_far(source: RowSource) -> int:
    """How many leases a worker should know of beyond the one that it has: 0 where nothing is fetched ahead."""
    if source.num_workers:
        return max(LEAST_AHEAD, source.num_workers)
    return LEAST_AHEAD if source.fetched_by == "thread" else 0


class Ahead:
    """`want` says which slices are fetched; no others are kept, so memory is bounded by what is wanted."""

    def __init__(self, source: RowSource) -> None:
        self._executor, self._fetch = _in_processes(source) if source.num_workers else _in_a_thread(source)
        self._is_stuck = False
        self._timeout_s = source.loader_timeout_s if source.num_workers else None
        self._under_way: dict[tuple[int, int], tuple[Job, Future[Any]]] = {}

    def want(self, jobs: Sequence[Job]) -> None:
        """From now on these, most urgent first. What is fetched of others is dropped."""
        wanted = {(job.step, job.v): job for job in jobs}
        for key in self._under_way.keys() - wanted.keys():
            self._under_way.pop(key)[1].cancel()
        for key, job in wanted.items():
            if key not in self._under_way:
                self._under_way[key] = job, self._submit(job)

    def has(self, step: int, v: int) -> bool:
        return (step, v) in self._under_way

    def take(self, step: int, v: int) -> Any:
        """The batch, once: whoever needs it again has it fetched again. Waits; raises `DataFetchFailed`."""
        job, future = self._under_way.pop((step, v))
        try:
            batch = future.result(self._timeout_s)
        except BrokenProcessPool as error:
            raise is_gone(error) from error
        except TimeoutError as error:
            if future.done() or self._timeout_s is None:  # the dataset's own
                raise failed_here(job, error) from error
            self._is_stuck = True
            raise is_late(self._timeout_s) from error
        except DataFetchFailed:
            raise
        except Exception as error:  # also of one that was fetched, and could not be sent
            raise fetch_failed(job, Failure(error)) from error
        if isinstance(batch, Failure):
            raise fetch_failed(job, batch) from LoaderError(batch.trace)
        return batch

    def close(self) -> None:
        """End the thread or the processes, when they are done with what they are fetching; if ever."""
        self._under_way.clear()
        if self._is_stuck:
            for process in list(getattr(self._executor, "_processes", {}).values()):
                process.kill()
        self._executor.shutdown(cancel_futures=True)

    def _submit(self, job: Job) -> Future[Any]:
        try:
            return self._executor.submit(self._fetch, job)
        except BrokenProcessPool as error:
            raise is_gone(error) from error
        except UNSENDABLE as error:
            raise cannot_be_sent(error) from error


def _in_a_thread(source: RowSource) -> tuple[Executor, Callable[[Job], Any]]:
    return ThreadPoolExecutor(1, "manyhands-prefetch"), source.take_job


def _in_processes(source: RowSource) -> tuple[Executor, Callable[[Job], Any]]:
    """Spawned ones, as a fork of a process with threads may hang; they end with this one, however that ends."""
    sent = copy.copy(source)
    executor = ProcessPoolExecutor(source.num_workers, LoaderContext(), _begin, (sent, os.getpid()))
    return executor, _fetch


# In a loader process: what it fetches from. It is sent once, when the process begins, and not with every job.
_source: RowSource | None = None


def _begin(source: RowSource, parent: int) -> None:
    global _source
    begin_process(parent)
    torch.set_num_threads(1)
    _source = source


def _fetch(job: Job) -> Any:
    assert _source is not None
    seed_all(job.key)
    try:
        return _source.take(job.rows)
    except Exception as error:
        return Failure(error)
