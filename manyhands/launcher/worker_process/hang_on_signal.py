"""A worker that hangs on a signal, for `mh chaos`: no signal of the system does that.

The handler is installed only if `spec.load.under_chaos` is true, before the user's code begins. The process then locks
a mutex twice while it holds the GIL: no thread runs Python any more, no message leaves it, and only SIGKILL ends it, as
with a deadlock inside an extension module.
"""

from __future__ import annotations

import ctypes
import signal
from types import FrameType

__all__ = ["HANG_SIGNAL", "install_hang_handler"]

HANG_SIGNAL = signal.SIGRTMIN + 8

MUTEX_BYTES = 128  # more than a pthread_mutex_t on any platform; all zero is an initialised mutex


def install_hang_handler() -> None:
    signal.signal(HANG_SIGNAL, _hang)


def _hang(number: int, frame: FrameType | None) -> None:
    # PyDLL keeps the GIL during the call. A wait that signals interrupt, such as pause(), would end when the agent
    # requests a stack.
    lock = ctypes.PyDLL(None).pthread_mutex_lock
    mutex = ctypes.create_string_buffer(MUTEX_BYTES)
    lock(mutex)
    lock(mutex)
