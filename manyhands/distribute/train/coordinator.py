"""Threads that stop together, and threads that fill a queue: TensorFlow 1's `Coordinator` and `QueueRunner`.

Plain Python threads: an operation of a graph is a function here. Start reading at `ThreadCoordinator`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from manyhands.errors import SpecError, UsageError
from manyhands.spec.keyword_check import checked_class, checked_keywords

__all__ = ["QueueRunner", "ThreadCoordinator", "add_queue_runner", "start_queue_runners"]

PUT_TIMEOUT_S = 0.1
_runners: list[QueueRunner] = []


@checked_class(name="Coordinator")
class ThreadCoordinator:
    """Threads of one process that end together: as TensorFlow's `Coordinator`.

    Args:
        clean_stop_exception_types: Exceptions that end the threads without being errors, such as StopIteration.
    """

    def __init__(self, clean_stop_exception_types: Sequence[type[BaseException]] = ()) -> None:
        self._clean = tuple(clean_stop_exception_types)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def request_stop(self, ex: BaseException | None = None) -> None:
        """Ask all threads to stop; `join` raises the first `ex` that is an error.

        Args:
            ex: Why, if it was an exception.
        """
        with self._lock:
            if ex is not None and self._error is None and not isinstance(ex, self._clean):
                self._error = ex
        self._stopping.set()

    def should_stop(self) -> bool:
        return self._stopping.is_set()

    def clear_stop(self) -> None:
        """Forget the request, and its exception: threads may be started again."""
        self._stopping.clear()
        self._error, self._threads = None, []

    def wait_for_stop(self, timeout: float | None = None) -> bool:
        return self._stopping.wait(timeout)

    @contextmanager
    def stop_on_exception(self) -> Iterator[None]:
        """Inside, an exception becomes a request to stop."""
        try:
            yield
        except Exception as error:
            self.request_stop(error)

    def register_thread(self, thread: threading.Thread) -> None:
        self._threads.append(thread)

    def raise_requested_exception(self) -> None:
        if self._error is not None:
            raise self._error

    def join(
        self,
        threads: Iterable[threading.Thread] | None = None,
        stop_grace_period_secs: float = 120,
        ignore_live_threads: bool = False,
    ) -> None:
        """Wait until all threads have ended; raises the error that a thread has stopped with.

        Args:
            threads: Beside those that were registered.
            stop_grace_period_secs: After a request to stop, how long to wait for them.
            ignore_live_threads: Leave threads that are still running then; otherwise they are an error.
        """
        every = [*self._threads, *(threads or ())]
        while any(one.is_alive() for one in every) and not self._stopping.wait(0.02):
            pass
        deadline = time.monotonic() + stop_grace_period_secs
        for one in every:
            one.join(max(0.0, deadline - time.monotonic()))
        alive = [one.name for one in every if one.is_alive()]
        self._threads = []
        self.raise_requested_exception()
        if alive and not ignore_live_threads:
            raise UsageError(
                f"{stop_grace_period_secs:g} s after the request to stop, these threads still run: {', '.join(alive)}.",
                where="Coordinator.join",
                fix=["while not coord.should_stop(): in each thread"],
            )


@checked_class()
class QueueRunner:
    """Threads that fill a `queue.Queue`: each calls one of `enqueue_ops` and puts what it returns.

    A function that raises StopIteration has no more. Once all have ended, the queue gets `QueueRunner.END`.

    Args:
        queue: The `queue.Queue`.
        enqueue_ops: Functions without arguments.
    """

    END = object()

    def __init__(self, queue: queue.Queue[Any], enqueue_ops: Sequence[Callable[[], Any]]) -> None:
        if not enqueue_ops or not all(map(callable, enqueue_ops)):
            raise SpecError(
                "enqueue_ops must be functions: here no graph has operations.",
                where="QueueRunner",
                fix=["QueueRunner(queue, [read_example] * 4)"],
            )
        self.queue, self._calls = queue, list(enqueue_ops)
        self._lock, self._running = threading.Lock(), 0
        self.put = 0
        """How many items its threads have put into the queue."""

    def create_threads(
        self, sess: Any = None, coord: ThreadCoordinator | None = None, daemon: bool = True, start: bool = False
    ) -> list[threading.Thread]:
        """One thread for each function. An exception stops all of the coordinator's threads.

        Args:
            sess: Not needed: a thread calls a function.
            coord: The coordinator that stops them. Default: one that nothing stops.
            daemon: Whether they end with the process.
            start: Start them.
        """
        coord, self._running = coord or ThreadCoordinator(), len(self._calls)
        threads = [
            threading.Thread(target=self._fill, args=(call, coord), name=f"manyhands-queue-{number}", daemon=daemon)
            for number, call in enumerate(self._calls)
        ]
        for thread in threads:
            coord.register_thread(thread)
            if start:
                thread.start()
        return threads

    def _fill(self, call: Callable[[], Any], coord: ThreadCoordinator) -> None:
        with coord.stop_on_exception():
            while not coord.should_stop():
                try:
                    item = call()
                except StopIteration:
                    break
                if self._put(item, coord):
                    with self._lock:
                        self.put += 1
        with self._lock:
            self._running -= 1
            is_last = self._running == 0
        if is_last and not self._put(self.END, coord):
            # Whoever takes items must not wait for more of them for ever; a full queue has some.
            with suppress(queue.Full):
                self.queue.put_nowait(self.END)

    def _put(self, item: Any, coord: ThreadCoordinator) -> bool:
        while not coord.should_stop():
            try:
                self.queue.put(item, timeout=PUT_TIMEOUT_S)
            except queue.Full:
                continue
            return True
        return False


@checked_keywords
def add_queue_runner(qr: QueueRunner) -> None:
    """Have `start_queue_runners` start it."""
    _runners.append(qr)


@checked_keywords
def start_queue_runners(
    sess: Any = None, coord: ThreadCoordinator | None = None, daemon: bool = True
) -> list[threading.Thread]:
    """Start the threads of every added queue runner.

    Args:
        sess: Not needed.
        coord: The coordinator that stops them.
        daemon: Whether they end with the process.
    """
    started = [one for runner in _runners for one in runner.create_threads(sess, coord, daemon, start=True)]
    _runners.clear()
    return started
