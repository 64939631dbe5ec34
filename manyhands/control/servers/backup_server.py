"""A host's backup process: it writes the logs of other hosts' servers to the run directory, through its page cache.

Bytes are acknowledged when this host's kernel has them. It writes them to disk even if the host that they came from,
this process, or its agent dies; they are lost only with this host, and then the servers still have the state that they
describe. The process is its agent's child: `backup_process` starts it. Start reading at `BackupStorage.keep`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import zmq

from manyhands import signals
from manyhands.comm.transport import Curve, Port, open_port
from manyhands.control.coordinator.process import read_exactly
from manyhands.control.security.rejected_peers import PeerGate
from manyhands.parameter_server.log.log_storage import (
    LOGS,
    AppendBytes,
    BytesAppended,
    Flush,
    Flushed,
    log_directory,
    segment_path,
)
from manyhands.spec.training_directory import home_of

__all__ = ["BackupConfig", "BackupStorage"]

# After this long without a message, what was received is flushed to where other hosts can read it.
QUIET_S = 0.2
MOST_SERVERS = 2**16
MOST_TRAININGS = 2**31


class BackupConfig(msgspec.Struct, frozen=True, kw_only=True):
    run_dir: str
    endpoint: str
    curve: Curve | None
    clients: bytes
    """The public key of peers that may connect."""


class BackupStorage:
    """The log segments that a backup is writing, one per server, of the training that it serves now."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._open: dict[int, tuple[Path, int, int]] = {}
        """By server: the path of the segment, its file descriptor, and its length."""
        self._changed: set[int] = set()

    def keep(self, message: AppendBytes) -> BytesAppended:
        """Append bytes that continue the segment; anything else changes nothing."""
        if not message.segment:
            return BytesAppended(segment=0, num_bytes=0)
        try:
            return BytesAppended(segment=message.segment, num_bytes=self._keep(message))
        except OSError as error:
            self._close(message.server)
            return BytesAppended(
                segment=message.segment, num_bytes=0, error=f"{error.strerror}: {error.filename or 'writing'}"
            )

    def _keep(self, message: AppendBytes) -> int:
        server = message.server
        logs = home_of(self._run_dir, message.training) / LOGS
        path = segment_path(log_directory(logs, server), message.segment)
        known, fd, length = self._open.get(server, (None, -1, 0))
        # A new segment may be another file at the path of one that a checkpoint made obsolete.
        if known != path or message.at == 0:
            fd, length = self._reopen(server, path)
        if message.at <= length:
            view = memoryview(message.data)[length - message.at :]  # a predecessor may have written some of it
            while len(view):
                written = os.write(fd, view)
                view, length = view[written:], length + written
                self._changed.add(server)
        self._open[server] = (path, fd, length)
        return length

    def _reopen(self, server: int, path: Path) -> tuple[int, int]:
        """The server creates the file: if it does not exist here, this is another directory."""
        self._close(server)
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._open[server] = (path, fd, 0)
        return fd, os.fstat(fd).st_size

    def _close(self, server: int) -> None:
        _, fd, _ = self._open.pop(server, (None, -1, 0))
        self._changed.discard(server)
        if fd >= 0:
            os.close(fd)  # which also flushes it on a network file system

    def flush(self) -> None:
        """Flush everything to where other hosts can read it."""
        for server in list(self._changed):
            os.fsync(self._open[server][1])
            self._changed.discard(server)

    def close(self) -> None:
        self.flush()
        for server in list(self._open):
            self._close(server)


def serve(config: BackupConfig, lifeline: int) -> None:
    """Serve until the other end of the lifeline is closed."""
    context: zmq.Context[Any] = zmq.Context()
    gate = PeerGate(context, config.clients) if config.curve is not None else None
    port: Port[AppendBytes | Flush] = open_port(
        context, zmq.ROUTER, config.endpoint, AppendBytes | Flush, bind=True, curve=config.curve
    )
    storage, poller = BackupStorage(Path(config.run_dir)), zmq.Poller()
    for one in (lifeline, port.socket, *(gate.sockets if gate is not None else ())):
        poller.register(one, zmq.POLLIN)
    try:
        while lifeline not in (ready := dict(poller.poll(round(QUIET_S * 1000)))):
            if gate is not None:
                gate.attend()
            for sender, message in port.receive():
                port.send(_answer(storage, message), to=sender)
            if not ready:
                storage.flush()
    finally:
        storage.close()
        context.destroy(linger=0)


def _answer(storage: BackupStorage, message: AppendBytes | Flush) -> BytesAppended | Flushed:
    if isinstance(message, Flush):
        storage.flush()
        return Flushed(message.ticket)
    if not (1 <= message.training < MOST_TRAININGS and 0 <= message.server < MOST_SERVERS):
        return BytesAppended(segment=message.segment, num_bytes=0, error="no such server")
    if min(message.segment, message.at) < 0:
        return BytesAppended(segment=message.segment, num_bytes=0, error="no such segment")
    return storage.keep(message)


def main() -> None:
    signals.ignore()  # its agent decides when it ends
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    lifeline = sys.stdin.fileno()
    size = int.from_bytes(read_exactly(lifeline, 4), "big")
    serve(msgspec.msgpack.decode(read_exactly(lifeline, size), type=BackupConfig), lifeline)


if __name__ == "__main__":
    main()
