"""Fetching a slice's rows: in the calling thread, in a prefetch thread, or in loader processes (`loader_processes`).

All fetchers take the same requests in the same order and return the same batches. A failure is kept until the step that
needs the slice, which raises it as `DataFetchFailed`. `feeds` makes the requests.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from manyhands.data.randomness import randomness
from manyhands.errors import DataFetchFailed, ManyhandsError

__all__ = ["CallerFetcher", "Fetcher", "SliceRequest", "Take", "ThreadFetcher", "failed", "failed_here", "fetch_now"]


class SliceRequest(NamedTuple):
    """One slice to fetch."""

    step: int
    v: int
    rows: npt.NDArray[np.int64]
    key: int


Take = Callable[[SliceRequest], Any]


class Fetcher(Protocol):
    """Returns the batches of an iterator of requests, in its order; requests that no step needs are skipped."""

    def get(self, step: int, v: int) -> Any:
        """The batch of a request; blocks until it is fetched; raises `DataFetchFailed`."""

    def close(self) -> None: ...


def failed(
    job: SliceRequest, kind: str, message: str, notes: Sequence[str] = (), *, trace: str = "", fix: Sequence[str] = ()
) -> DataFetchFailed:
    """The error shown to the user, with the step, the slice and its rows; `trace` is a loader process's traceback."""
    rows = job.rows.tolist()
    shown = ", ".join(map(str, rows[:8])) + (f", ... {len(rows)} in all" if len(rows) > 8 else "")
    which = f"slice {job.v} of step {job.step}" if job.step else f"piece {job.v} of an evaluation"
    what = f"Fetching {which} failed. {kind}: {message}"
    what += "".join(f" ({note})" for note in notes) + f"\n  rows: {shown}"
    if trace:
        what += f"\n  in the loader process:\n{trace.rstrip()}"
    return DataFetchFailed(what, fix=fix or ["read these rows of your data in one process, without manyhands"])


def failed_here(job: SliceRequest, error: BaseException) -> DataFetchFailed:
    return failed(job, type(error).__name__, str(error), getattr(error, "__notes__", ()))


def fetch_now(take: Take, job: SliceRequest, *, draws: bool = True) -> Any:
    """Fetch in the calling thread, with the slice's seed set if user code `draws`: it may use any generator."""
    try:
        with randomness(job.key) if draws else contextlib.nullcontext():
            return take(job)
    except DataFetchFailed:
        raise
    except Exception as error:
        raise failed_here(job, error) from error


class CallerFetcher:
    """Fetches in the thread that runs the step: safe for user code, as no other thread draws meanwhile."""

    def __init__(self, take: Take, jobs: Iterator[SliceRequest], *, draws: bool = True) -> None:
        self._take, self._jobs, self._draws = take, jobs, draws

    def get(self, step: int, v: int) -> Any:
        for job in self._jobs:
            if (job.step, job.v) == (step, v):
                return fetch_now(self._take, job, draws=self._draws)
        raise ManyhandsError(f"Slice {v} of step {step} was requested twice, or out of order.")

    def close(self) -> None:
        pass


class ThreadFetcher:
    """One thread, at most `ahead` slices ahead. For sources that run no user code and draw no random numbers."""

    def __init__(self, take: Take, jobs: Iterator[SliceRequest], ahead: int) -> None:
        self._take = take
        # Two SimpleQueues, which are C: a bounded queue.Queue takes several locks in Python for each item.
        self._done: queue.SimpleQueue[tuple[SliceRequest | None, Any, BaseException | None]] = queue.SimpleQueue()
        self._permits: queue.SimpleQueue[bool] = queue.SimpleQueue()
        for _ in range(ahead):
            self._permits.put(True)
        self._thread = threading.Thread(target=self._work, args=(jobs,), name="manyhands-prefetch", daemon=True)
        self._thread.start()

    def _work(self, jobs: Iterator[SliceRequest]) -> None:
        job: SliceRequest | None = None
        try:
            for job in jobs:
                if not self._permits.get():
                    return
                self._done.put((job, self._take(job), None))
            self._done.put((None, None, ManyhandsError("A slice was requested twice, or out of order.")))
        except BaseException as error:  # any error is raised in the step that waits for this request
            self._done.put((job, None, error))

    def get(self, step: int, v: int) -> Any:
        while True:
            job, batch, error = self._done.get()
            if error is not None:
                self._done.put((job, batch, error))  # the next call gets the same error
                raise (error if job is None else failed_here(job, error)) from error
            self._permits.put(True)
            if job is not None and (job.step, job.v) == (step, v):
                return batch

    def close(self) -> None:
        # Only the caller of `get` adds permits, so after draining them "stop" is the next item the thread reads.
        _drain(self._permits)
        self._permits.put(False)
        # The thread itself may drop the last reference, or the interpreter may be exiting with its threads stopped.
        if self._thread is not threading.current_thread() and not sys.is_finalizing():
            self._thread.join()
        _drain(self._done)
        self._done.put((None, None, ManyhandsError("A slice was requested after its batches were closed.")))


def _drain(items: queue.SimpleQueue[Any]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            items.get_nowait()
