"""A queue of calls: assigns calls to workers, and reassigns them when workers die. Pure: no sockets, no clock.

A call is assigned to a free worker, each time with a new attempt number; only reports of the newest attempt count, so
each call completes once, no matter how often it was started. After a failure, waiting calls are cancelled, running ones
finish, and then the failure is due: to be raised once. Start reading at `CallQueue.hand_out`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

__all__ = ["MOST_LOSSES", "MOST_WAITING", "CallQueue", "HandOut", "LostWorker"]

MOST_WAITING = 256 * 1024
# A call that kills every worker that runs it would otherwise be retried for ever. Workers lost for other reasons are
# rarely running the same call this often.
MOST_LOSSES = 10

W = TypeVar("W", bound=Hashable)


class HandOut(NamedTuple, Generic[W]):
    call: int
    attempt: int
    worker: W
    snapshot: int
    """The last commit that the call sees."""


class LostWorker(NamedTuple):
    """Effect of a lost worker on the call that it was running, and on other calls."""

    call: int | None = None
    losses: int = 0
    """How many workers were lost while they ran this call."""
    failed: bool = False
    """Too many workers were lost: the call has failed."""
    cancelled: tuple[int, ...] = ()


class CallQueue(Generic[W]):
    """Calls are numbered from 1 in the order in which they were scheduled, and assigned in that order."""

    def __init__(self, most_waiting: int = MOST_WAITING, most_losses: int = MOST_LOSSES) -> None:
        self._most_waiting, self._most_losses = most_waiting, most_losses
        self._scheduled = 0
        self._waiting: deque[int] = deque()
        self._running: dict[W, HandOut[W]] = {}
        self._free: dict[W, None] = {}
        self._attempts: dict[int, int] = {}
        self._losses: dict[int, int] = {}
        self._failed: int | None = None

    # ---- state -----------------------------------------------------------------------------------------------

    @property
    def room(self) -> bool:
        """Whether a call may be scheduled now: the queue is not full, and there is no failure to raise."""
        return len(self._waiting) < self._most_waiting and self._failed is None

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    @property
    def failure_due(self) -> int | None:
        """The call whose failure is to be raised; None while any call is running."""
        return self._failed if not self._running else None

    def fails_for(self, call: int) -> bool:
        """Whether this call's failure will be raised; of several failures, the first is."""
        return call == self._failed

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> dict[W, HandOut[W]]:
        return dict(self._running)

    def oldest_snapshot(self, newest: int) -> int:
        """The oldest snapshot that a running call may read; versions replaced before it can be dropped."""
        return min((given.snapshot for given in self._running.values()), default=newest)

    # ---- calls -----------------------------------------------------------------------------------------------

    def schedule(self) -> int:
        """Add a call and return its number. Only if there is `room`."""
        assert self.room
        self._scheduled += 1
        self._waiting.append(self._scheduled)
        return self._scheduled

    def hand_out(self, snapshot: int) -> HandOut[W] | None:
        """Assign the next call to the worker that has been free the longest; None if there is no call or worker."""
        if not self._waiting or not self._free:
            return None
        call, worker = self._waiting.popleft(), next(iter(self._free))
        del self._free[worker]
        self._attempts[call] = self._attempts.get(call, 0) + 1
        given = self._running[worker] = HandOut(call, self._attempts[call], worker, snapshot)
        return given

    def is_at(self, worker: W, call: int, attempt: int) -> bool:
        """Whether that worker is running that attempt, so that its report counts."""
        given = self._running.get(worker)
        return given is not None and (given.call, given.attempt) == (call, attempt)

    def done(self, worker: W, call: int, attempt: int) -> bool:
        """End the call; False if the report is not of its newest attempt, and so ignored."""
        if not self.is_at(worker, call, attempt):
            return False
        self._end(worker)
        return True

    def failed(self, worker: W, call: int, attempt: int) -> list[int] | None:
        """The calls that are cancelled because of the failure; None if the report does not count."""
        if not self.is_at(worker, call, attempt):
            return None
        self._end(worker)
        return self._fail(call)

    def begin_again(self, worker: W, call: int, attempt: int) -> bool:
        """Put a call that cannot finish, through no fault of its step, back at the front of the queue.

        If there is a failure to raise, the call is cancelled instead: returns False.
        """
        assert self.is_at(worker, call, attempt)
        del self._running[worker]
        self._free[worker] = None
        if self._failed is not None:
            self._forget(call)
            return False
        self._waiting.appendleft(call)
        return True

    def cancel_waiting(self) -> list[int]:
        cancelled = list(self._waiting)
        self._waiting.clear()
        for call in cancelled:
            self._forget(call)
        return cancelled

    def raised(self) -> None:
        """The failure that was due has been raised: the queue accepts calls again."""
        assert self.failure_due is not None
        self._failed = None

    # ---- workers ---------------------------------------------------------------------------------------------

    def came(self, worker: W) -> None:
        """Add a worker that is ready for its first call."""
        assert worker not in self._running
        self._free[worker] = None

    def lost(self, worker: W) -> LostWorker:
        """Remove a lost worker. Its call goes back to the front of the queue."""
        self._free.pop(worker, None)
        given = self._running.pop(worker, None)
        if given is None:
            return LostWorker()
        call = given.call
        losses = self._losses[call] = self._losses.get(call, 0) + 1
        if self._failed is not None:
            self._forget(call)
            return LostWorker(call, losses, cancelled=(call,))
        if losses >= self._most_losses:
            self._forget(call)
            return LostWorker(call, losses, failed=True, cancelled=tuple(self._fail(call)))
        self._waiting.appendleft(call)
        return LostWorker(call, losses)

    def _end(self, worker: W) -> None:
        self._forget(self._running.pop(worker).call)
        self._free[worker] = None

    def _fail(self, call: int) -> list[int]:
        if self._failed is None:
            self._failed = call
        return self.cancel_waiting()

    def _forget(self, call: int) -> None:
        self._attempts.pop(call, None)
        self._losses.pop(call, None)
