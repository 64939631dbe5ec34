"""The exchange between a worker and one server until a stream is complete: messages in, messages out.

A `StreamTransfer` returns the messages that are due, takes the server's answers, and resends after a silence. It
survives lost, repeated, late and broken messages, and a server that dies and restarts. `ServerConnection.carry` gives
it a socket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from manyhands.parameter_server.memory.frames import FRAME_BYTES, Fetching, Sending, SpanStream, checksum
from manyhands.parameter_server.protocol.leases import Lease
from manyhands.parameter_server.protocol.messages import (
    Bring,
    FrameReply,
    FromServer,
    Got,
    GradientPart,
    Number,
    Of,
    Open,
    Opened,
    Want,
)

__all__ = ["FetchStream", "OpenStream", "PushStream", "StreamTransfer"]


class StreamTransfer(Protocol):
    server: int

    @property
    def is_done(self) -> bool: ...

    def due(self) -> list[Any]:
        """Messages to send now."""

    def hear(self, message: FromServer) -> bool:
        """Whether it was an answer to this transfer."""

    def again(self) -> None:
        """No answer for a while: send again."""


class PushStream:
    """A gradient, to the server's buffer."""

    def __init__(self, server: int, number: Number, worker: int, held: Lease, stream: SpanStream) -> None:
        self.server, self._number, self._worker, self._held, self._stream = server, number, worker, held, stream
        self._sending = Sending(stream.num_bytes)

    @property
    def is_done(self) -> bool:
        return self._sending.is_done

    def due(self) -> list[Any]:
        return [self._piece(offset, self._stream.read(offset, length)) for offset, length in self._sending.due()]

    def _piece(self, offset: int, data: bytes) -> GradientPart:
        crc = checksum(self._held.filling, offset, data)
        return GradientPart(
            number=self._number, worker=self._worker, held=self._held, offset=offset, crc=crc, data=data
        )

    def hear(self, message: FromServer) -> bool:
        mine = isinstance(message, Got) and message.number == self._number and message.filling == self._held.filling
        if isinstance(message, Got) and mine:
            self._sending.hear(message.received)
        return mine

    def again(self) -> None:
        self._sending.again()


class OpenStream:
    """An `Open`, and the initial state of its interval."""

    def __init__(self, server: int, opened: Open, stream: SpanStream) -> None:
        self.server, self._opened, self._stream = server, opened, stream
        self._sending, self._is_sent, self._is_accepted = Sending(stream.num_bytes), False, False
        self.is_done = False

    def due(self) -> list[Any]:
        if not self._is_accepted:
            was_sent, self._is_sent = self._is_sent, True
            return [] if was_sent else [self._opened]
        return [self._bring(offset, self._stream.read(offset, length)) for offset, length in self._sending.due()]

    def _bring(self, offset: int, data: bytes) -> Bring:
        return Bring(number=self._opened.number, offset=offset, crc=checksum(0, offset, data), data=data)

    def hear(self, message: FromServer) -> bool:
        if message.number != self._opened.number:
            return False
        if isinstance(message, Opened):
            self.is_done = True
        elif isinstance(message, Got) and message.filling == 0:
            self._is_accepted = True
            self._sending.hear(message.received)
        else:
            return False
        return True

    def again(self) -> None:
        """The server may have died: its successor has received nothing of it."""
        self._is_sent = self._is_accepted = False
        self._sending.again()


class FetchStream:
    """Weights, optimizer states, or a server's progress.

    If a version is given, it is fetched whole or not at all. If the newest is wanted, and servers make newer ones
    faster than this one arrives, frames may be of several versions.
    """

    def __init__(
        self,
        server: int,
        number: Number,
        ticket: int,
        of: Of,
        version: int | None,
        write: Callable[[int, bytes], None] | None = None,
    ) -> None:
        self.server, self._number, self._ticket, self._of, self._version = server, number, ticket, of, version
        self._is_exact, self._write = version is not None, write or self._store
        self._fetching, self._stored = Fetching(), dict[int, bytes]()
        self._oldest: int | None = None
        self.is_gone = False

    @property
    def is_done(self) -> bool:
        return self.is_gone or self._fetching.is_done

    @property
    def oldest(self) -> int:
        assert self._oldest is not None, "nothing has come"
        return self._oldest

    @property
    def value(self) -> bytes:
        """What has arrived, if it was not written elsewhere."""
        return b"".join(self._stored[offset] for offset in sorted(self._stored))

    def due(self) -> list[Any]:
        return [
            Want(number=self._number, ticket=self._ticket, of=self._of, version=self._version, offset=offset)
            for offset in self._fetching.due()
        ]

    def hear(self, message: FromServer) -> bool:
        if not isinstance(message, FrameReply) or message.ticket != self._ticket:
            return False
        if not message.is_there:
            self._miss(message.version)
        elif self._is_sound(message) and self._fetching.hear(message.offset, message.num_bytes):
            self._version = message.version if self._version is None else self._version
            self._oldest = min(message.version, message.version if self._oldest is None else self._oldest)
            if message.data:
                self._write(message.offset, message.data)
        return True

    def _is_sound(self, part: FrameReply) -> bool:
        length = min(FRAME_BYTES, part.num_bytes - part.offset)
        return len(part.data) == length and checksum(part.ticket, part.offset, part.data) == part.crc

    def _miss(self, newest: int) -> None:
        if self._is_exact:
            self.is_gone = True
        elif self._version is not None and newest > self._version:
            self._version = newest
            self._fetching.again()

    def _store(self, offset: int, data: bytes) -> None:
        self._stored[offset] = data

    def again(self) -> None:
        self._fetching.again()
