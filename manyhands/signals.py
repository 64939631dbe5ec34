"""The signals that ask a run to stop, and how each of its processes handles them.

Slurm (`proctrack/linuxproc`), systemd (`KillMode=control-group`) and others send them to every process of a job at the
same time. Only the launcher acts on them: it asks workers for a checkpoint and ends the run. All other processes of the
run therefore ignore them, and are ended by the launcher or with it. Start reading at `STOP_SIGNALS`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

__all__ = [
    "REPEAT_AFTER_S",
    "STOP_SIGNALS",
    "ends_at_once",
    "grace",
    "held_back",
    "ignore",
    "leave_to_launcher",
    "notices",
    "too_slow_to_commit",
]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Schedulers send a notice twice, or to the job and then to its step. Within this time a repeat counts as the first.
REPEAT_AFTER_S = 5.0
# Of the time until a placer kills, this much is for ending the run in good order.
TO_END_S = 5.0
BEFORE_LIMIT_S = 60.0

_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


def ends_at_once(number: int, since_first_s: float | None) -> bool:
    """Whether a signal cancels the checkpoint that an earlier one requested; None: there was no earlier one.

    Ctrl-C does, as a person sends it. Any other signal does so only `REPEAT_AFTER_S` or more after the first.
    """
    return since_first_s is not None and (number == signal.SIGINT or since_first_s >= REPEAT_AFTER_S)


def notices(signals: Sequence[int], *, lifeline_ended: bool) -> list[int]:
    """What a launcher acts on: the signals that arrived, and for the end of its lifeline one SIGTERM.

    A placer that can send no signals, such as `ssh`, holds the other end of the lifeline: when it dies, or closes it,
    that is its notice.
    """
    return [*signals, *([int(signal.SIGTERM)] if lifeline_ended else [])]


def grace(asked_s: float, *, kill_after_s: float | None, left_s: float | None) -> float:
    """How long workers get to commit after a notice, if the placer kills `kill_after_s` after it.

    `left_s`: until the time limit. A notice shortly before it was sent because of it (Slurm's `--signal=TERM@120`), and
    the placer kills only after the limit.
    """
    if kill_after_s is None:
        return asked_s
    by_limit = left_s is not None and left_s <= asked_s + BEFORE_LIMIT_S
    until_killed = kill_after_s + (left_s or 0.0 if by_limit else 0.0)
    return min(asked_s, max(until_killed - TO_END_S, until_killed / 2))


def too_slow_to_commit(took_s: float, kill_after_s: float | None) -> bool:
    """Whether a checkpoint that takes this long would be cut off by a placer that gives this much notice."""
    return kill_after_s is not None and took_s > max(kill_after_s - TO_END_S, kill_after_s / 2)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """A process started inside has these signals blocked until it calls `ignore`: none can end it before that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore() -> None:
    """For a process that its parent ends. Programs that it starts with `exec` get the signals as usual."""
    leave_to_launcher()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def leave_to_launcher() -> Callable[[], None]:
    """Ignore these signals in this process, unless the script has set a handler; returns a function that undoes it.

    Python allows this in the main thread only; in other threads this changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    owner = os.getpid()

    def do_nothing(number: int, frame: FrameType | None) -> None:
        # Not SIG_IGN, which survives exec: `terminate()` of a process that the script starts would do nothing.
        if os.getpid() != owner:  # a fork, which its parent may end with these signals
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    before: dict[int, Any] = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    changed = {number: handler for number, handler in before.items() if handler in _DEFAULTS}
    for number in changed:
        signal.signal(number, do_nothing)

    def undo() -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in changed.items():
            if signal.getsignal(number) is do_nothing:  # else the script has set a handler since
                signal.signal(number, handler)

    return undo
