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

__all__ = ["REPEAT_AFTER_S", "STOP_SIGNALS", "ends_at_once", "held_back", "ignore", "leave_to_launcher", "notices"]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Schedulers send a notice twice, or to the job and then to its step. Within this time a repeat counts as the first.
REPEAT_AFTER_S = 5.0

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
