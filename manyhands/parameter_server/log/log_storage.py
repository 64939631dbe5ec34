"""Where a server stores its log: in local files, or through a backup on another host.

A storage has one segment at a time. What it has settled outlives the failure that it protects against: a synced file a
power cut, any other file the death of every process of this host, and a backup the loss of this host. The storage of a
segment is chosen when it begins. Start reading at `DiskStorage`, then at `BackupStorageClient.append` and
`Backups.choose`.
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
    "AppendBytes",
    "BackupStorageClient",
    "Backups",
    "BytesAppended",
    "DiskStorage",
    "Flush",
    "Flushed",
    "FromBackup",
    "LogStorage",
    "StorageLost",
    "log_directory",
    "segment_path",
]

# In the directory of a training.
LOGS = "updates"
PIECE_BYTES = 2**19
# Maximum in flight to a backup, which is also the most that would be sent again to a successor with its address.
WINDOW_BYTES = 16 * 2**20
# A backup that is silent for this long is asked how much it has;
ASK_S = 0.2
# and one that has confirmed nothing more for this long is given up.
LOST_AFTER_S = 10.0
# An address that was given up is tried again after this time.
RETRY_S = 600.0


def log_directory(logs: Path, server: int) -> Path:
    return logs / f"server-{server}"


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"{number:08}.log"


class AppendBytes(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """To a backup: bytes of a segment. It appends those that continue what it has; without any, it is a query."""

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


class BytesAppended(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Answer to every `AppendBytes`: how many bytes of the segment the backup has now."""

    segment: int
    num_bytes: int
    error: str = ""


class Flushed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    ticket: int


FromBackup = BytesAppended | Flushed


class StorageLost(Exception):
    """What was written there may be lost, and nothing more can be written; the message says why."""


class LogStorage(Protocol):
    takes_time: bool
    """Settling is slow, so that several updates should share it."""

    def begin(self, path: Path) -> None: ...

    def append(self, parts: Sequence[Bytes]) -> None: ...

    def settle(self) -> None:
        """Return when all that was written is safe from the failure that this storage protects against."""

    def end(self) -> None: ...


class DiskStorage:
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


class BackupStorageClient:
    """The backup writes to the same file, from its own host. `StorageLost` when it no longer answers.

    A successor at its address continues where it was: what it lacks is sent again.
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
        """`is_known`: whether the backup belongs to the run, by the latest list that this server has."""
        self._port, self._training, self._server, self._is_known = port, training, server, is_known
        self._clock = clock
        self._segment, self._end, self._confirmed = 0, 0, 0
        self._in_flight: deque[AppendBytes] = deque()
        self._confirmed_at, self._is_asking = 0.0, False

    def answers(self) -> bool:
        """Whether a backup answers at this address."""
        self._segment, self._end, self._confirmed = 0, 0, -1
        self._begin_waiting()
        try:
            while self._confirmed < 0:
                self._receive_or_ask()
        except StorageLost:
            return False
        return True

    def begin(self, path: Path) -> None:
        os.close(_create(path))  # a backup that does not find this file has another run directory
        self._segment, self._end, self._confirmed = int(path.stem), 0, 0
        self._in_flight.clear()

    def append(self, parts: Sequence[Bytes]) -> None:
        data = b"".join(parts)
        for start in range(0, len(data), PIECE_BYTES):
            self._send(data[start : start + PIECE_BYTES])

    def _send(self, data: bytes) -> None:
        self._begin_waiting()
        while self._end + len(data) - self._confirmed > WINDOW_BYTES:
            self._receive_or_ask()
        piece = self._message(data)
        self._in_flight.append(piece)
        self._end += len(data)
        self._port.send(piece)  # if it is lost, the next answer shows what is missing

    def settle(self) -> None:
        self._begin_waiting()
        while self._confirmed < self._end:
            self._receive_or_ask()

    def end(self) -> None:
        self._in_flight.clear()

    def _begin_waiting(self) -> None:
        self._confirmed_at, self._is_asking = self._clock(), False

    def _receive_or_ask(self) -> None:
        """Read what has arrived, or ask."""
        is_quiet = not self._port.socket.poll(round(ASK_S * 1000))
        for _, message in self._port.receive():
            if isinstance(message, BytesAppended) and message.segment == self._segment:
                self._take_answer(message)
        if not self._is_known():
            raise StorageLost("its host has left the run")
        if self._clock() - self._confirmed_at > LOST_AFTER_S:
            raise StorageLost(f"it has confirmed nothing for {LOST_AFTER_S:g} s")
        if is_quiet:
            self._is_asking = True
            self._port.send(self._message(b""))

    def _message(self, data: bytes) -> AppendBytes:
        return AppendBytes(training=self._training, server=self._server, segment=self._segment, at=self._end, data=data)

    def _take_answer(self, answer: BytesAppended) -> None:
        if answer.error:
            raise StorageLost(answer.error)
        if answer.num_bytes > self._confirmed:
            self._confirmed, self._confirmed_at = answer.num_bytes, self._clock()
        while self._in_flight and self._in_flight[0].end <= self._confirmed:
            self._in_flight.popleft()
        if self._is_asking:  # what it lacks was on its way to a process that has died
            self._is_asking = False
            for piece in self._in_flight:
                self._port.send(piece)


class Backups:
    """The backups that a server may write to, as they join and leave. Without any, segments go to local files."""

    def __init__(
        self,
        server: int,
        addresses: Callable[[], Sequence[str]],
        connect: Callable[[str], Port[FromBackup]],
        clock: Callable[[], float] = time.monotonic,
        *,
        training: int = 1,
    ) -> None:
        """`addresses` returns those of backups on other hosts, the preferred one first."""
        self._training, self._server = training, server
        self._addresses, self._connect, self._clock = addresses, connect, clock
        self._ports: dict[str, Port[FromBackup]] = {}
        self._given_up: dict[str, float] = {}
        self._tickets = 0
        self.at: str | None = None
        """The address of the backup that has the segment."""

    def choose(self) -> LogStorage:
        """The storage for the next segment."""
        for address in self._usable():
            is_known = partial(self._is_known, address)
            storage = BackupStorageClient(self._port(address), self._training, self._server, is_known, self._clock)
            if storage.answers():
                self.at = address
                return storage
            self._given_up[address] = self._clock()
        self.at = None
        return DiskStorage(synced=False)

    def give_up(self) -> None:
        """The backup that has the segment has failed."""
        if self.at is not None:
            self._given_up[self.at] = self._clock()
        self.at = None

    @property
    def are_better(self) -> bool:
        """Whether the next segment would go to a backup, and this one does not."""
        return self.at is None and bool(self._usable())

    def flush(self) -> None:
        """Make what other hosts have written readable on this one, as far as those hosts answer."""
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
