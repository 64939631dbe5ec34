"""A cluster that stays warm between the tests of a file, and a place where calls wait until a test lets them go on."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import manyhands as mh

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def warm() -> Iterator[mh.Cluster]:
    """Two workers and a server, which listens on loopback as well."""
    with mh.Cluster(workers=2, servers=1, steps="dispatch_steps", seed=7, listen="127.0.0.1", most_waiting=500) as one:
        yield one


@pytest.fixture
def coordinator(warm: mh.Cluster) -> mh.Coordinator:
    return mh.Coordinator(warm)


class Meeting:
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
        """Whoever waits goes on."""
        for one in self._waiting:
            one.close()
        self._waiting = []

    def close(self) -> None:
        self.let_go()
        self._socket.close()


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[Meeting]:
    found = Meeting(tmp_path / "meeting")
    yield found
    found.close()
