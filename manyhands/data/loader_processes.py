"""Loader processes: torch's DataLoader reads a user's data ahead, in separate processes.

A request is one slice, seeded with the slice's key in the process that fetches it, so the number of processes affects
only speed. Processes are spawned (a fork of a process with threads may hang) and end with this process, even if it is
killed. Batches are sent through shared memory; one that does not fit there becomes an error of its slice
(multiprocessing would drop it, and the worker would wait for ever), and a worker waits for a slice at most
`loader_timeout_s`.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import multiprocessing.queues
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from manyhands import signals
from manyhands.data.fetchers import SliceRequest, failed
from manyhands.data.loader_spawn import LoaderContext
from manyhands.data.randomness import seed_all
from manyhands.data.sources.row_source import RowSource
from manyhands.errors import DataError, DataFetchFailed, ManyhandsError

__all__ = [
    "UNSENDABLE",
    "Loader",
    "LoaderError",
    "LoaderFailure",
    "ProcessFetcher",
    "begin_process",
    "cannot_be_sent",
    "fetch_failed",
    "is_gone",
    "is_late",
    "lacks_room",
    "room_fix",
    "start",
    "stream_loader",
]

_PR_SET_PDEATHSIG = 1

UNSENDABLE = (pickle.PicklingError, AttributeError, TypeError)
"""What multiprocessing raises for data that cannot be sent to a process."""


class LoaderError(Exception):
    """The cause of a `DataFetchFailed` in a loader process; its text is that process's traceback."""


class LoaderFailure:
    """An exception of a loader process as text, because not every exception can be pickled."""

    def __init__(self, error: BaseException) -> None:
        self.kind, self.message = type(error).__name__, str(error)
        self.notes = list(getattr(error, "__notes__", []))
        self.trace = "".join(traceback.format_exception(error))


def fetch_failed(job: SliceRequest, failure: LoaderFailure) -> DataFetchFailed:
    """The error of a slice that a loader process could not fetch, or could not send."""
    fix = room_fix() if lacks_room(failure.message) else ()
    return failed(job, failure.kind, failure.message, failure.notes, trace=failure.trace, fix=fix)


def lacks_room(message: str) -> bool:
    """Whether an error message is about shared memory: as torch, the kernel, or SIGBUS reports it."""
    return any(text in message for text in ("shared memory", "No space left on device", "Bus error"))


def room_fix() -> Sequence[str]:
    """What to do when batches do not fit in shared memory."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return ["num_workers=0", "smaller batches, or more slices"]
    state = os.statvfs(shared)
    size, free = state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize
    return [
        f"more memory in /dev/shm, which has {size / 2**20:.0f} MB, {free / 2**20:.0f} MB of them free: docker run "
        "--shm-size=1g, or mount -o remount,size=1g /dev/shm",
        "num_workers=0: without loader processes nothing is sent",
        "smaller batches, more slices, or fewer loader processes",
    ]


class _Slices(Dataset[Any]):
    def __init__(self, source: RowSource) -> None:
        self._source = copy.copy(source)  # without its kept loader, which would make a reference cycle

    def __getitem__(self, job: SliceRequest) -> Any:
        seed_all(job.key)
        try:
            return job, self._source.take(job.rows)
        except Exception as error:
            return job, LoaderFailure(error)


class ProcessFetcher:
    """Slices from a `Loader`, which can be used again when this is closed."""

    def __init__(self, loader: Loader, jobs: Iterator[SliceRequest]) -> None:
        self._items: Generator[Any, None, None] | None = loader.run(jobs)

    def get(self, step: int, v: int) -> Any:
        assert self._items is not None, "called after close"
        for job, batch in self._items:
            if (job.step, job.v) != (step, v):
                continue
            if isinstance(batch, LoaderFailure):
                raise fetch_failed(job, batch) from LoaderError(batch.trace)
            return batch
        raise ManyhandsError(f"Slice {v} of step {step} was requested twice, or out of order.")

    def close(self) -> None:
        if self._items is not None:
            self._items.close()
            self._items = None


class _Jobs:
    """The DataLoader's sampler. Not part of `Loader`, because a reference cycle would keep processes alive."""

    def __init__(self) -> None:
        self.requests: Iterator[SliceRequest] = iter(())

    def __iter__(self) -> Iterator[SliceRequest]:
        return self.requests


class Loader:
    """Processes that fetch slices, in total about `ahead` slices ahead, for one iterator of requests at a time."""

    def __init__(self, source: RowSource, ahead: int) -> None:
        self._jobs = _Jobs()
        self._loader: DataLoader[Any] | None = _data_loader(
            _Slices(source), source.num_workers, ahead, self._jobs, source.loader_timeout_s
        )

    def run(self, jobs: Iterator[SliceRequest]) -> Generator[Any, None, None]:
        assert self._loader is not None, "called after close"
        self._jobs.requests = jobs
        return start(self._loader)

    def close(self) -> None:
        """Works in any state of the processes."""
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None:
            # An error of an ending process does not matter; without that method processes end with this one.
            with contextlib.suppress(RuntimeError, AttributeError):
                iterator._shutdown_workers()
        self._loader = None


def stream_loader(dataset: Dataset[Any], ahead: int, timeout_s: float | None) -> DataLoader[Any]:
    """One process that iterates over `dataset`."""
    return _data_loader(dataset, 1, ahead, None, timeout_s)


def _data_loader(
    dataset: Dataset[Any], num_workers: int, ahead: int, jobs: _Jobs | None, timeout_s: float | None
) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=jobs,
        num_workers=num_workers,
        collate_fn=_as_is,
        prefetch_factor=max(1, -(-ahead // num_workers)),
        multiprocessing_context=LoaderContext(),
        persistent_workers=True,
        worker_init_fn=functools.partial(begin_process, os.getpid()),
        timeout=timeout_s or 0,
        generator=torch.Generator(),  # a separate one: the default would draw from the run's generator
    )


def start(loader: DataLoader[Any]) -> Generator[Any, None, None]:
    """The loader's items, in order. The processes are started when this returns."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Got pickle error")  # cannot_be_sent reports it
            return _until_closed(iter(loader), loader.timeout)
    except UNSENDABLE as error:
        raise cannot_be_sent(error) from error


def cannot_be_sent(error: Exception) -> DataError:
    return DataError(
        f"The data cannot be sent to a loader process: {error}.",
        fix=[
            "num_workers=0",
            "no lambda, no open file, no class inside a function in the dataset",
        ],
    )


def is_gone(error: Exception) -> DataFetchFailed:
    usual = ["num_workers=0, to see the error itself", 'if __name__ == "__main__": around the main part of the script']
    fix = room_fix() if lacks_room(str(error)) else usual
    return DataFetchFailed(f"A loader process died: {error}.", fix=fix)


def is_late(timeout_s: float) -> DataFetchFailed:
    return DataFetchFailed(
        f"Loader processes are alive, but sent nothing for {timeout_s:g} s.",
        where="[train] loader_timeout_s, or the DataLoader's timeout",
        fix=[
            "num_workers=0, to see what the dataset waits for",
            f"[train] loader_timeout_s = {2 * timeout_s:g}, if a slice may take this long to load",
            *room_fix()[:1],
        ],
    )


def _until_closed(items: Iterator[Any], timeout_s: float) -> Generator[Any, None, None]:
    try:
        yield from items
    except RuntimeError as error:
        raise (is_late(timeout_s) if "timed out" in str(error) else is_gone(error)) from error


def _as_is(value: Any) -> Any:
    return value


def begin_process(parent: int, _number: int = 0) -> None:
    """The first call in a loader process."""
    _end_with_parent(parent)
    # The hook is meant to be overridden (concurrent.futures does); this process has no other queues.
    multiprocessing.queues.Queue._on_queue_feeder_error = _send_failure_instead  # type: ignore[attr-defined]


def _send_failure_instead(queue: Any, error: Exception, item: Any) -> None:
    """For a batch that cannot be sent: by default it is dropped, and the worker would wait for it for ever."""
    number, data = item
    is_slice = isinstance(data, tuple) and isinstance(data[0], SliceRequest)
    queue.put((number, (data[0], LoaderFailure(error)) if is_slice else LoaderFailure(error)))


def _end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends. Stop signals are handled by the parent only."""
    signals.ignore()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(1)
