"""Where a server writes its log: to files of its own, or through a backup on another host.

A place has one segment at a time. What it has settled outlives the failure that it is for: a synced file the loss of
power, any other file the loss of every process of this host, and a backup the loss of this host. Which place a segment
goes to is decided when it begins. Start reading at `OnDisk`, then at `AtBackup.append` and `Backups.choose`.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from manyhands.comm.transport import Port
from manyhands.parameter_server.log.log_format import Bytes
from manyhands.private_files import open_private

__all__ = [
    "LOGS",
    "AtBackup",
    "Backups",
    "Flush",
    "Flushed",
    "FromBackup",
    "Keep",
    "Kept",
    "OnDisk",
    "Place",
    "PlaceLost",
    "log_directory",
    "segment_path",
]

# In the home of a training.
LOGS = "updates"
PIECE_BYTES = 2**19
# So much is under way to a backup at once; and so much would be sent again to another process with its address.
WINDOW_BYTES = 16 * 2**20
# A backup that says nothing for so long is asked how much it has;
ASK_S = 0.2
# and one that has taken nothing more for so long is given up.
LOST_AFTER_S = 10.0
# An address that was given up is tried again after so long.
RETRY_S = 600.0


def log_directory(logs: Path, server: int) -> Path:
    return logs / f"server-{server}"


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"{number:08}.log"


class Keep(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """To a backup: bytes of a segment. It takes those that continue what it has; without any, it is a question."""

    training: int
    server: int
    segment: int
    at: int
    data: bytes

    @property
    def end(self) -> int:
        return self.at + len(self.data)


class Flush(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Have everything where other hosts can read it."""

    ticket: int


class Kept(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """To every Keep: how many bytes of the segment there are now."""

    segment: int
    num_bytes: int
    error: str = ""


class Flushed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    ticket: int


FromBackup = Kept | Flushed


class PlaceLost(Exception):
    """What was written there may be lost, and no more can be; the words say why."""


class Place(Protocol):
    takes_time: bool
    """Settling does, so that several updates should share it."""

    def begin(self, path: Path) -> None: ...

    def append(self, parts: Sequence[Bytes]) -> None: ...

    def settle(self) -> None:
        """Return when all that was written is safe from what this place is for."""

    def end(self) -> None: ...


class OnDisk:
    def __init__(self, *, synced: bool) -> None:
        self.takes_time, self._fd = synced, -1

    def begin(self, path: Path) -> None:
        self._fd = _create(path)

    def append(self, parts: Sequence[Bytes]) -> None:
        for part in parts:
            view = memoryview(part)
            while len(view):
                view = view[os.write(self._fd, view) :]

    def settle(self) -> None:
        if self.takes_time:
            os.fsync(self._fd)

    def end(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class AtBackup:
    """The backup writes to the same file, by way of its own host. `PlaceLost` when it does not answer any more.

    Another process that takes its address goes on where it was: what it lacks is sent again.
    """

    takes_time = True

    def __init__(
        self,
        port: Port[FromBackup],
        training: int,
        server: int,
        is_known: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        """`is_known`: the run knows of it, as far as has been heard here."""
        self._port, self._training, self._server, self._is_known = port, training, server, is_known
        self._clock = clock
        self._segment, self._end, self._kept = 0, 0, 0
        self._under_way: deque[Keep] = deque()
        self._moved_at, self._is_asking = 0.0, False

    def answers(self) -> bool:
        """Whether there is one."""
        self._segment, self._end, self._kept = 0, 0, -1
        self._begin_waiting()
        try:
            while self._kept < 0:
                self._listen()
        except PlaceLost:
            return False
        return True

    def begin(self, path: Path) -> None:
        os.close(_create(path))  # a backup that does not find it there has another run directory
        self._segment, self._end, self._kept = int(path.stem), 0, 0
        self._under_way.clear()

    def append(self, parts: Sequence[Bytes]) -> None:
        data = b"".join(parts)
        for start in range(0, len(data), PIECE_BYTES):
            self._send(data[start : start + PIECE_BYTES])

    def _send(self, data: bytes) -> None:
        self._begin_waiting()
        while self._end + len(data) - self._kept > WINDOW_BYTES:
            self._listen()
        piece = self._keep(data)
        self._under_way.append(piece)
        self._end += len(data)
        self._port.send(piece)  # if it is lost, whoever answers says what is missing

    def settle(self) -> None:
        self._begin_waiting()
        while self._kept < self._end:
            self._listen()

    def end(self) -> None:
        self._under_way.clear()

    def _begin_waiting(self) -> None:
        self._moved_at, self._is_asking = self._clock(), False

    def _listen(self) -> None:
        """Hear what there is to hear, or ask."""
        is_quiet = not self._port.socket.poll(round(ASK_S * 1000))
        for _, message in self._port.receive():
            if isinstance(message, Kept) and message.segment == self._segment:
                self._hear(message)
        if not self._is_known():
            raise PlaceLost("its host has left the run")
        if self._clock() - self._moved_at > LOST_AFTER_S:
            raise PlaceLost(f"it has had nothing to say for {LOST_AFTER_S:g} s")
        if is_quiet:
            self._is_asking = True
            self._port.send(self._keep(b""))

    def _keep(self, data: bytes) -> Keep:
        return Keep(training=self._training, server=self._server, segment=self._segment, at=self._end, data=data)

    def _hear(self, told: Kept) -> None:
        if told.error:
            raise PlaceLost(told.error)
        if told.num_bytes > self._kept:
            self._kept, self._moved_at = told.num_bytes, self._clock()
        while self._under_way and self._under_way[0].end <= self._kept:
            self._under_way.popleft()
        if self._is_asking:  # what it lacks was on its way to a process that is gone
            self._is_asking = False
            for piece in self._under_way:
                self._port.send(piece)


class Backups:
    """Those that a server may write to, as they come and go. Without any, segments go to files of its own."""

    def __init__(
        self,
        server: int,
        addresses: Callable[[], Sequence[str]],
        connect: Callable[[str], Port[FromBackup]],
        clock: Callable[[], float] = time.monotonic,
        *,
        training: int = 1,
    ) -> None:
        """`addresses` has those of backups on other hosts, the one that is to be preferred first."""
        self._training, self._server = training, server
        self._addresses, self._connect, self._clock = addresses, connect, clock
        self._ports: dict[str, Port[FromBackup]] = {}
        self._given_up: dict[str, float] = {}
        self._tickets = 0
        self.at: str | None = None
        """The address of the one that has the segment."""

    def choose(self) -> Place:
        """Where the next segment goes."""
        for address in self._usable():
            is_known = partial(self._is_known, address)
            place = AtBackup(self._port(address), self._training, self._server, is_known, self._clock)
            if place.answers():
                self.at = address
                return place
            self._given_up[address] = self._clock()
        self.at = None
        return OnDisk(synced=False)

    def give_up(self) -> None:
        """The one that has the segment has failed."""
        if self.at is not None:
            self._given_up[self.at] = self._clock()
        self.at = None

    @property
    def are_better(self) -> bool:
        """Whether the next segment would go to a backup, and this one does not."""
        return self.at is None and bool(self._usable())

    def flush(self) -> None:
        """Have other hosts' writing where this one can read it, as far as those hosts answer."""
        self._tickets += 1
        for address in self._usable():
            if not self._flush(self._port(address)):
                self._given_up[address] = self._clock()

    def _flush(self, port: Port[FromBackup]) -> bool:
        deadline = self._clock() + LOST_AFTER_S
        port.send(Flush(self._tickets))
        while self._clock() < deadline:
            if any(isinstance(one, Flushed) and one.ticket == self._tickets for _, one in port.receive()):
                return True
            port.socket.poll(round(ASK_S * 1000))
        return False

    def _is_known(self, address: str) -> bool:
        return address in self._addresses()

    def _usable(self) -> list[str]:
        now = self._clock()
        return [one for one in self._addresses() if now - self._given_up.get(one, -RETRY_S) >= RETRY_S]

    def _port(self, address: str) -> Port[FromBackup]:
        if address not in self._ports:
            self._ports[address] = self._connect(address)
        return self._ports[address]

    def close(self) -> None:
        for port in self._ports.values():
            port.close()


def _create(path: Path) -> int:
    return open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
