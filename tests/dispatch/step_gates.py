"""A gate at which steps wait until a test opens it."""

from __future__ import annotations

import socket
from pathlib import Path


class StepGate:
    """A socket at which steps wait."""

    def __init__(self, path: Path) -> None:
        self.place = str(path)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.place)
        self._socket.listen()
        self._socket.settimeout(60)
        self._waiting: list[socket.socket] = []

    def await_one(self) -> None:
        """Until one more step waits here."""
        self._waiting.append(self._socket.accept()[0])

    def let_go(self) -> None:
        """All steps that wait here continue."""
        for one in self._waiting:
            one.close()
        self._waiting = []

    def close(self) -> None:
        self.let_go()
        self._socket.close()
