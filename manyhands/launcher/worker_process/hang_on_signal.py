"""A worker that can be told to hang: what `mh chaos` needs that no signal of the system does.

Only where `spec.load.under_chaos` says so is the signal taken, before the user's code begins. The process then locks a
mutex twice while it holds the interpreter: no thread of it runs Python any more, no message leaves it, and only being
killed ends it, as with a deadlock inside an extension module.
"""

from __future__ import annotations

import ctypes
import signal
from types import FrameType

__all__ = ["HANG_SIGNAL", "hang_when_told"]

HANG_SIGNAL = signal.SIGRTMIN + 8

MUTEX_BYTES = 128  # more than a pthread_mutex_t of any platform; all zero is one that is ready to use


def hang_when_told() -> None:
    signal.signal(HANG_SIGNAL, _hang)


def _hang(number: int, frame: FrameType | None) -> None:
    # PyDLL keeps the interpreter's lock during the call. A wait that signals interrupt, such as pause(), would end when
    # the agent asks for a stack.
    lock = ctypes.PyDLL(None).pthread_mutex_lock
    mutex = ctypes.create_string_buffer(MUTEX_BYTES)
    lock(mutex)
    lock(mutex)
