"""Signals to the launcher, as a file descriptor for a poll loop."""

from __future__ import annotations

import signal
import socket
import threading
from types import FrameType
from typing import Any

from manyhands.signals import STOP_SIGNALS

__all__ = ["StopSignals"]


class StopSignals:
    """Catches the signals that mean "stop" while it is open. Outside the main thread it catches none."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._arrived: list[int] = []
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
            self._wakeup_before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append(number)

    @property
    def fd(self) -> int:
        return self._read.fileno()

    def take(self) -> list[int]:
        """The signals received since the last call."""
        try:
            while self._read.recv(64):
                pass
        except BlockingIOError:
            pass
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self) -> None:
        if self._before:
            signal.set_wakeup_fd(self._wakeup_before)
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before = {}
        self._read.close()
        self._write.close()
