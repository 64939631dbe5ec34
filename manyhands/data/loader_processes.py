"""Loader processes: a user's data read ahead, in processes of its own, by torch's DataLoader.

A job is one slice, seeded with the slice's key in the process that fetches it, so the number of processes changes
nothing but speed. Processes are spawned (a fork of a process with threads may hang) and end with this one, however that
ends. A batch travels through shared memory; one that finds no room there becomes an error of its slice (multiprocessing
would drop it, and we would wait for ever), and no slice is waited for longer than `loader_timeout_s`.
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
from manyhands.data.fetchers import Job, failed
from manyhands.data.loader_spawn import LoaderContext
from manyhands.data.randomness import seed_all
from manyhands.data.sources.row_source import RowSource
from manyhands.errors import DataError, DataFetchFailed, ManyhandsError

__all__ = [
    "UNSENDABLE",
    "Failure",
    "InProcesses",
    "Loader",
    "LoaderError",
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
    """Stands for the exception that a loader process met; its text is that process's traceback."""


class Failure:
    """An exception of a loader process as text, because not every exception survives the way."""

    def __init__(self, error: BaseException) -> None:
        self.kind, self.message = type(error).__name__, str(error)
        self.notes = list(getattr(error, "__notes__", []))
        self.trace = "".join(traceback.format_exception(error))


def fetch_failed(job: Job, failure: Failure) -> DataFetchFailed:
    """The error of a slice that a loader process could not fetch, or could not send."""
    fix = room_fix() if lacks_room(failure.message) else ()
    return failed(job, failure.kind, failure.message, failure.notes, trace=failure.trace, fix=fix)


def lacks_room(message: str) -> bool:
    """Whether an error speaks of shared memory: torch's own words, the kernel's, and those for SIGBUS."""
    return any(words in message for words in ("shared memory", "No space left on device", "Bus error"))


def room_fix() -> Sequence[str]:
    """What to do where batches find no room in the memory that processes share."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return ["num_workers=0", "smaller batches, or more slices"]
    state = os.statvfs(shared)
    size, free = state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize
    return [
        f"more room in /dev/shm, which has {size / 2**20:.0f} MB, {free / 2**20:.0f} MB of them free: docker run "
        "--shm-size=1g, or mount -o remount,size=1g /dev/shm",
        "num_workers=0: without loader processes nothing is sent",
        "smaller batches, more slices, or fewer loader processes",
    ]


class _Slices(Dataset[Any]):
    def __init__(self, source: RowSource) -> None:
        self._source = copy.copy(source)  # without its kept loader, which would be a reference cycle

    def __getitem__(self, job: Job) -> Any:
        seed_all(job.key)
        try:
            return job, self._source.take(job.rows)
        except Exception as error:
            return job, Failure(error)


class InProcesses:
    """Slices from a `Loader`, which can be used again when this is closed."""

    def __init__(self, loader: Loader, jobs: Iterator[Job]) -> None:
        self._items: Generator[Any, None, None] | None = loader.run(jobs)

    def get(self, step: int, v: int) -> Any:
        assert self._items is not None, "asked after close"
        for job, batch in self._items:
            if (job.step, job.v) != (step, v):
                continue
            if isinstance(batch, Failure):
                raise fetch_failed(job, batch) from LoaderError(batch.trace)
            return batch
        raise ManyhandsError(f"Slice {v} of step {step} was asked for twice, or out of order.")

    def close(self) -> None:
        if self._items is not None:
            self._items.close()
            self._items = None


class _Jobs:
    """What a DataLoader takes for its sampler. Apart from `Loader`, as a reference cycle would keep processes alive."""

    def __init__(self) -> None:
        self.now: Iterator[Job] = iter(())

    def __iter__(self) -> Iterator[Job]:
        return self.now


class Loader:
    """Processes that fetch slices, together about `ahead` slices ahead, for one iterator of jobs at a time."""

    def __init__(self, source: RowSource, ahead: int) -> None:
        self._jobs = _Jobs()
        self._loader: DataLoader[Any] | None = _data_loader(
            _Slices(source), source.num_workers, ahead, self._jobs, source.loader_timeout_s
        )

    def run(self, jobs: Iterator[Job]) -> Generator[Any, None, None]:
        assert self._loader is not None, "asked after close"
        self._jobs.now = jobs
        return start(self._loader)

    def close(self) -> None:
        """Whatever became of the processes."""
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None:
            # One that crashes while it ends has nothing left to give; without that method processes end with us.
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
        generator=torch.Generator(),  # of its own: the default draws from the run's
    )


def start(loader: DataLoader[Any]) -> Generator[Any, None, None]:
    """What the loader gives, in order. Processes are there when this returns."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Got pickle error")  # we say it ourselves
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
    usual = ["num_workers=0, to see the error itself", 'if __name__ == "__main__": around what the script does']
    fix = room_fix() if lacks_room(str(error)) else usual
    return DataFetchFailed(f"A loader process is gone: {error}.", fix=fix)


def is_late(timeout_s: float) -> DataFetchFailed:
    return DataFetchFailed(
        f"Loader processes live, but gave nothing for {timeout_s:g} s.",
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
    """The first thing that a loader process does."""
    _end_with_parent(parent)
    # The hook is there to be overridden (concurrent.futures does); this process is ours, and sends nothing else.
    multiprocessing.queues.Queue._on_queue_feeder_error = _send_failure_instead  # type: ignore[attr-defined]


def _send_failure_instead(queue: Any, error: Exception, item: Any) -> None:
    """Of a batch that cannot be sent: by default it is dropped, and whoever waits for it waits for ever."""
    number, data = item
    is_slice = isinstance(data, tuple) and isinstance(data[0], Job)
    queue.put((number, (data[0], Failure(error)) if is_slice else Failure(error)))


def _end_with_parent(parent: int) -> None:
    """Have the kernel end this process with its parent. Stop signals are for the parent to act on."""
    signals.ignore()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel was told
        os._exit(1)
