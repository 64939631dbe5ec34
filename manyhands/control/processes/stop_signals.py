"""Signals to the launcher, and the end of its lifeline, as file descriptors for a poll loop."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from types import FrameType
from typing import Any

from manyhands.signals import STOP_SIGNALS, notices

__all__ = ["StopSignals"]


class StopSignals:
    """Catches the signals that mean "stop" while it is open. Outside the main thread it catches none.

    `lifeline`: a descriptor, such as standard input, whose end of file means "stop" too.
    """

    def __init__(self, lifeline: int | None = None) -> None:
        self._lifeline = lifeline
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

    @property
    def lifeline(self) -> int | None:
        """To be watched as well, until it has ended."""
        return self._lifeline

    def take(self) -> list[int]:
        """The signals received since the last call, with SIGTERM for the end of the lifeline."""
        try:
            while self._read.recv(64):
                pass
        except BlockingIOError:
            pass
        arrived, self._arrived = self._arrived, []
        return notices(arrived, lifeline_ended=self._lifeline_ended())

    def _lifeline_ended(self) -> bool:
        """Whether it has ended since the last call. What is written to it is dropped, in bounded pieces."""
        if self._lifeline is None or not select.select([self._lifeline], [], [], 0)[0]:
            return False
        try:
            ended = not os.read(self._lifeline, 4096)
        except OSError:
            ended = True  # a terminal that hung up, a socket that was reset
        self._lifeline = None if ended else self._lifeline
        return ended

    def close(self) -> None:
        if self._before:
            signal.set_wakeup_fd(self._wakeup_before)
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before = {}
        self._read.close()
        self._write.close()
