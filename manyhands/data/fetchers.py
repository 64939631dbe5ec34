"""Who fetches a slice's rows: the calling thread, a thread ahead of it, or loader processes (`loader_processes`).

All of them take the same jobs in the same order and give the same batches. A failure is kept until the step that
needs the slice, and is then raised there as `DataFetchFailed`. Which jobs there are is `feeds`.
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

__all__ = ["Fetcher", "InCaller", "InThread", "Job", "Take", "failed", "failed_here", "fetch_now"]


class Job(NamedTuple):
    """One slice to fetch."""

    step: int
    v: int
    rows: npt.NDArray[np.int64]
    key: int


Take = Callable[[Job], Any]


class Fetcher(Protocol):
    """Gives the batches of an iterator of jobs, in its order; jobs nobody asks for are passed over."""

    def get(self, step: int, v: int) -> Any:
        """The batch of a job; blocks until it is there; raises `DataFetchFailed`."""

    def close(self) -> None: ...


def failed(
    job: Job, kind: str, message: str, notes: Sequence[str] = (), *, trace: str = "", fix: Sequence[str] = ()
) -> DataFetchFailed:
    """The error a user sees, with the step, the slice and the rows in it; `trace` is a loader process's traceback."""
    rows = job.rows.tolist()
    told = ", ".join(map(str, rows[:8])) + (f", ... {len(rows)} in all" if len(rows) > 8 else "")
    which = f"slice {job.v} of step {job.step}" if job.step else f"piece {job.v} of an evaluation"
    what = f"Fetching {which} failed. {kind}: {message}"
    what += "".join(f" ({note})" for note in notes) + f"\n  rows: {told}"
    if trace:
        what += f"\n  in the loader process:\n{trace.rstrip()}"
    return DataFetchFailed(what, fix=fix or ["read these rows of your data by hand, in one process"])


def failed_here(job: Job, error: BaseException) -> DataFetchFailed:
    return failed(job, type(error).__name__, str(error), getattr(error, "__notes__", ()))


def fetch_now(take: Take, job: Job, *, draws: bool = True) -> Any:
    """In the thread that asks, with the slice's randomness set where user code `draws`: it may use any generator."""
    try:
        with randomness(job.key) if draws else contextlib.nullcontext():
            return take(job)
    except DataFetchFailed:
        raise
    except Exception as error:
        raise failed_here(job, error) from error


class InCaller:
    """In the thread that runs the step: the safe place for user code, as no other thread draws meanwhile."""

    def __init__(self, take: Take, jobs: Iterator[Job], *, draws: bool = True) -> None:
        self._take, self._jobs, self._draws = take, jobs, draws

    def get(self, step: int, v: int) -> Any:
        for job in self._jobs:
            if (job.step, job.v) == (step, v):
                return fetch_now(self._take, job, draws=self._draws)
        raise ManyhandsError(f"Slice {v} of step {step} was asked for twice, or out of order.")

    def close(self) -> None:
        pass


class InThread:
    """One thread, at most `ahead` slices ahead. For sources that run no user code and draw nothing."""

    def __init__(self, take: Take, jobs: Iterator[Job], ahead: int) -> None:
        self._take = take
        # Two SimpleQueues, which are C: a bounded queue.Queue takes several locks in Python for each item.
        self._done: queue.SimpleQueue[tuple[Job | None, Any, BaseException | None]] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[bool] = queue.SimpleQueue()
        for _ in range(ahead):
            self._room.put(True)
        self._thread = threading.Thread(target=self._work, args=(jobs,), name="manyhands-prefetch", daemon=True)
        self._thread.start()

    def _work(self, jobs: Iterator[Job]) -> None:
        job: Job | None = None
        try:
            for job in jobs:
                if not self._room.get():
                    return
                self._done.put((job, self._take(job), None))
            self._done.put((None, None, ManyhandsError("A slice was asked for twice, or out of order.")))
        except BaseException as error:  # whatever it is, it belongs to the step that waits for this job
            self._done.put((job, None, error))

    def get(self, step: int, v: int) -> Any:
        while True:
            job, batch, error = self._done.get()
            if error is not None:
                self._done.put((job, batch, error))  # whoever asks again gets it again
                raise (error if job is None else failed_here(job, error)) from error
            self._room.put(True)
            if job is not None and (job.step, job.v) == (step, v):
                return batch

    def close(self) -> None:
        # Only the caller of `get` adds room, so after draining it "stop" is the next thing the thread reads.
        _drain(self._room)
        self._room.put(False)
        # The last reference may be dropped by the thread itself, or while the interpreter ends and threads stand still.
        if self._thread is not threading.current_thread() and not sys.is_finalizing():
            self._thread.join()
        _drain(self._done)
        self._done.put((None, None, ManyhandsError("A slice was asked for after its batches were closed.")))


def _drain(items: queue.SimpleQueue[Any]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            items.get_nowait()
