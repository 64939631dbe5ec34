"""A host's backup: it writes the logs of other hosts' servers to the run directory, by way of its own memory.

Bytes are acknowledged when this host's kernel has them. From there they find their way to the disk whatever becomes of
the host that they came from, of this process, or of its agent; they are lost with this host alone, and then the
servers still have what they are about. The process is its agent's child: `backup_process` starts it. Start reading at
`Shelf.keep`.
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
from manyhands.control.security.rejected_peers import DoorKeeper
from manyhands.parameter_server.log.log_storage import LOGS, Flush, Flushed, Keep, Kept, log_directory, segment_path
from manyhands.spec.training_directory import home_of

__all__ = ["BackupConfig", "Shelf"]

# When nothing has come for so long, what has is brought to where other hosts can read it.
QUIET_S = 0.2
MOST_SERVERS = 2**16
MOST_TRAININGS = 2**31


class BackupConfig(msgspec.Struct, frozen=True, kw_only=True):
    run_dir: str
    endpoint: str
    curve: Curve | None
    clients: bytes
    """The public key of those who may come in."""


class Shelf:
    """The segments that a backup is writing, one for each server: of the training that it serves now."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._open: dict[int, tuple[Path, int, int]] = {}
        """By server: the path of the segment, its file, and how long that is."""
        self._changed: set[int] = set()

    def keep(self, message: Keep) -> Kept:
        """Take what continues what is there; anything else changes nothing."""
        if not message.segment:
            return Kept(segment=0, num_bytes=0)
        try:
            return Kept(segment=message.segment, num_bytes=self._keep(message))
        except OSError as error:
            self._close(message.server)
            return Kept(segment=message.segment, num_bytes=0, error=f"{error.strerror}: {error.filename or 'writing'}")

    def _keep(self, message: Keep) -> int:
        server = message.server
        logs = home_of(self._run_dir, message.training) / LOGS
        path = segment_path(log_directory(logs, server), message.segment)
        known, fd, length = self._open.get(server, (None, -1, 0))
        # A segment that begins may have the path, and be another file, than one that a checkpoint made needless.
        if known != path or message.at == 0:
            fd, length = self._reopen(server, path)
        if message.at <= length:
            view = memoryview(message.data)[length - message.at :]  # a process before this may have written some of it
            while len(view):
                written = os.write(fd, view)
                view, length = view[written:], length + written
                self._changed.add(server)
        self._open[server] = (path, fd, length)
        return length

    def _reopen(self, server: int, path: Path) -> tuple[int, int]:
        """Whoever writes to it has made it: where it is not, this is another directory."""
        self._close(server)
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._open[server] = (path, fd, 0)
        return fd, os.fstat(fd).st_size

    def _close(self, server: int) -> None:
        _, fd, _ = self._open.pop(server, (None, -1, 0))
        self._changed.discard(server)
        if fd >= 0:
            os.close(fd)  # which also flushes it where the disk is a network's

    def flush(self) -> None:
        """Have all of it where other hosts can read it."""
        for server in list(self._changed):
            os.fsync(self._open[server][1])
            self._changed.discard(server)

    def close(self) -> None:
        self.flush()
        for server in list(self._open):
            self._close(server)


def serve(config: BackupConfig, lifeline: int) -> None:
    """Until the other end of the lifeline is gone."""
    context: zmq.Context[Any] = zmq.Context()
    door = DoorKeeper(context, config.clients) if config.curve is not None else None
    port: Port[Keep | Flush] = open_port(
        context, zmq.ROUTER, config.endpoint, Keep | Flush, bind=True, curve=config.curve
    )
    shelf, poller = Shelf(Path(config.run_dir)), zmq.Poller()
    for one in (lifeline, port.socket, *(door.sockets if door is not None else ())):
        poller.register(one, zmq.POLLIN)
    try:
        while lifeline not in (ready := dict(poller.poll(round(QUIET_S * 1000)))):
            if door is not None:
                door.attend()
            for sender, message in port.receive():
                port.send(_answer(shelf, message), to=sender)
            if not ready:
                shelf.flush()
    finally:
        shelf.close()
        context.destroy(linger=0)


def _answer(shelf: Shelf, message: Keep | Flush) -> Kept | Flushed:
    if isinstance(message, Flush):
        shelf.flush()
        return Flushed(message.ticket)
    if not (1 <= message.training < MOST_TRAININGS and 0 <= message.server < MOST_SERVERS):
        return Kept(segment=message.segment, num_bytes=0, error="no such server")
    if min(message.segment, message.at) < 0:
        return Kept(segment=message.segment, num_bytes=0, error="no such segment")
    return shelf.keep(message)


def main() -> None:
    signals.ignore()  # its agent says when
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    lifeline = sys.stdin.fileno()
    size = int.from_bytes(read_exactly(lifeline, 4), "big")
    serve(msgspec.msgpack.decode(read_exactly(lifeline, size), type=BackupConfig), lifeline)


if __name__ == "__main__":
    main()
