"""A queue of calls: which worker does which, and what counts when workers die. Pure: no sockets, no clock.

A call is handed out to a free worker, with a fresh attempt number each time; only what its newest attempt says counts,
so it is done once, however often it was begun. After a failure the calls that wait are cancelled, those under way come
to their end, and then the failure is due: to be raised once. Start reading at `Queue.hand_out`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

__all__ = ["MOST_LOSSES", "MOST_WAITING", "HandOut", "Loss", "Queue"]

MOST_WAITING = 256 * 1024
# A call that takes its worker with it every time would otherwise take all of them, for ever. Workers that are lost for
# reasons of their own, one after the other, are rarely in the same call so often.
MOST_LOSSES = 10

W = TypeVar("W", bound=Hashable)


class HandOut(NamedTuple, Generic[W]):
    call: int
    attempt: int
    worker: W
    snapshot: int
    """The last commit that it sees."""


class Loss(NamedTuple):
    """What the loss of a worker means for the call that it was at, and for others."""

    call: int | None = None
    losses: int = 0
    """How many workers were lost in it."""
    failed: bool = False
    """They were too many: the call has failed."""
    cancelled: tuple[int, ...] = ()


class Queue(Generic[W]):
    """Calls are numbered from 1 in the order in which they were scheduled, and handed out in that order."""

    def __init__(self, most_waiting: int = MOST_WAITING, most_losses: int = MOST_LOSSES) -> None:
        self._most_waiting, self._most_losses = most_waiting, most_losses
        self._scheduled = 0
        self._waiting: deque[int] = deque()
        self._running: dict[W, HandOut[W]] = {}
        self._free: dict[W, None] = {}
        self._attempts: dict[int, int] = {}
        self._losses: dict[int, int] = {}
        self._failed: int | None = None

    # ---- what there is ---------------------------------------------------------------------------------------

    @property
    def room(self) -> bool:
        """Whether a call may be scheduled now: the queue is not full, and no failure waits to be raised."""
        return len(self._waiting) < self._most_waiting and self._failed is None

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    @property
    def failure_due(self) -> int | None:
        """The call whose failure is to be raised; only once nothing is under way any more."""
        return self._failed if not self._running else None

    def fails_for(self, call: int) -> bool:
        """Whether it is this call's failure that will be raised; of several, it is the first."""
        return call == self._failed

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> dict[W, HandOut[W]]:
        return dict(self._running)

    def oldest_snapshot(self, newest: int) -> int:
        """What nobody needs to see any more lies before this commit."""
        return min((given.snapshot for given in self._running.values()), default=newest)

    # ---- calls -----------------------------------------------------------------------------------------------

    def schedule(self) -> int:
        """The number of a new call. Only where there is `room`."""
        assert self.room
        self._scheduled += 1
        self._waiting.append(self._scheduled)
        return self._scheduled

    def hand_out(self, snapshot: int) -> HandOut[W] | None:
        """The next call for the worker that has been free the longest; None while there is no such pair."""
        if not self._waiting or not self._free:
            return None
        call, worker = self._waiting.popleft(), next(iter(self._free))
        del self._free[worker]
        self._attempts[call] = self._attempts.get(call, 0) + 1
        given = self._running[worker] = HandOut(call, self._attempts[call], worker, snapshot)
        return given

    def is_at(self, worker: W, call: int, attempt: int) -> bool:
        """Whether what that worker says of that attempt counts."""
        given = self._running.get(worker)
        return given is not None and (given.call, given.attempt) == (call, attempt)

    def done(self, worker: W, call: int, attempt: int) -> bool:
        """Whether this ends the call. What it says for an attempt that is not the newest is ignored."""
        if not self.is_at(worker, call, attempt):
            return False
        self._end(worker)
        return True

    def failed(self, worker: W, call: int, attempt: int) -> list[int] | None:
        """The calls that are cancelled because of it; None where it does not count."""
        if not self.is_at(worker, call, attempt):
            return None
        self._end(worker)
        return self._fail(call)

    def begin_again(self, worker: W, call: int, attempt: int) -> bool:
        """It cannot be finished as begun, through no fault of its own: it is handed out again, before all others.

        Where a failure is due it is cancelled instead: False.
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
        """The failure that was due has been raised: the queue takes calls again."""
        assert self.failure_due is not None
        self._failed = None

    # ---- workers ---------------------------------------------------------------------------------------------

    def came(self, worker: W) -> None:
        """A worker that is ready for its first call."""
        assert worker not in self._running
        self._free[worker] = None

    def lost(self, worker: W) -> Loss:
        """A worker is gone. What it was at is handed out again, before all others."""
        self._free.pop(worker, None)
        given = self._running.pop(worker, None)
        if given is None:
            return Loss()
        call = given.call
        losses = self._losses[call] = self._losses.get(call, 0) + 1
        if self._failed is not None:
            self._forget(call)
            return Loss(call, losses, cancelled=(call,))
        if losses >= self._most_losses:
            self._forget(call)
            return Loss(call, losses, failed=True, cancelled=tuple(self._fail(call)))
        self._waiting.appendleft(call)
        return Loss(call, losses)

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
