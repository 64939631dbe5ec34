"""Typed messages over ZeroMQ sockets, which never block and trust no input.

A `Port` is one socket, the Struct types it accepts, and limits: one frame per message, at most `MAX_MESSAGE_BYTES`,
bounded queues. A port opened `with_frames` accepts frames of raw bytes after each message, such as the tensors of
`tensor_messages`. Messages that do not decode are counted and dropped, never raised. The caller knows the peers and the
meaning of the messages, and passes CURVE keys in `Curve`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import zmq

__all__ = [
    "MAX_FRAMES",
    "MAX_FRAME_BYTES",
    "MAX_MESSAGE_BYTES",
    "Curve",
    "Frame",
    "Message",
    "Port",
    "SocketEvent",
    "open_port",
    "socket_event",
]

MAX_MESSAGE_BYTES = 2**20
MAX_FRAME_BYTES = 2**31
MAX_FRAMES = 10_000
# Enough for the rendezvous of all ranks of a large host at once; more messages are dropped, so memory stays bounded.
QUEUE_MESSAGES = 10_000
# Most messages read from one ready socket before the other sockets are read.
BURST = 500
HANDSHAKE_MS = 5000

M = TypeVar("M")
Frame = bytes | memoryview


class Curve(msgspec.Struct, frozen=True):
    """CURVE keys of one end, in Z85. A server has no `server_key`; ZAP identifies its clients."""

    public: bytes
    secret: bytes
    server_key: bytes | None = None
    domain: bytes = b"run"


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="m", tag=True):
    """Base of all messages. The class name identifies it on the wire; one with an undeclared field is refused."""


class Port(Generic[M]):
    """One ROUTER or DEALER socket for messages of type `accepts`. For one thread only, like every ZeroMQ socket."""

    def __init__(self, socket: zmq.Socket[bytes], accepts: Any, *, with_frames: bool = False) -> None:
        self.socket = socket
        self.garbage = 0
        """Number of received messages that were invalid."""
        self.dropped = 0
        """Number of messages not sent: too large, the queue was full, or the receiver was not connected."""
        self._routed = socket.type == zmq.ROUTER
        self._max_frames = MAX_FRAMES if with_frames else 1
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(accepts)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: Any, frames: Sequence[Frame] = (), *, to: bytes = b"") -> bool:
        """Queue a message; False when it was dropped."""
        header, address = self._encoder.encode(message), [to] if self._routed else []
        if len(header) > MAX_MESSAGE_BYTES:
            self.dropped += 1
            return False
        try:
            self.socket.send_multipart([*address, header, *frames], zmq.DONTWAIT)
        except zmq.ZMQError:
            self.dropped += 1
            return False
        return True

    def receive(self, most: int = BURST) -> Iterator[tuple[bytes, M]]:
        """The messages that have arrived, as (sender, message), without waiting."""
        return ((sender, message) for sender, message, _ in self.receive_with_frames(most))

    def receive_with_frames(self, most: int = BURST) -> Iterator[tuple[bytes, M, list[bytes]]]:
        """The same, as (sender, message, the frames that follow it)."""
        for _ in range(most):
            try:
                frames = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.ZMQError:
                return
            sender = frames.pop(0) if self._routed else b""
            try:
                if not 1 <= len(frames) <= self._max_frames or len(frames[0]) > MAX_MESSAGE_BYTES:
                    raise ValueError("not a message")
                message = self._decoder.decode(frames[0])
            # RecursionError: deeply nested arrays; UnicodeDecodeError is a ValueError, as MsgspecError is.
            except (ValueError, RecursionError, OverflowError, MemoryError):
                self.garbage += 1
            else:
                yield sender, message, frames[1:]

    def close(self, linger_ms: int = 0) -> None:
        self.socket.close(linger_ms)


def open_port(
    context: zmq.Context[Any],
    kind: int,
    endpoint: str,
    accepts: Any,
    *,
    bind: bool = False,
    identity: bytes | None = None,
    curve: Curve | None = None,
    with_frames: bool = False,
) -> Port[Any]:
    """A bound or connecting port. Raises `zmq.ZMQError` if the address cannot be bound."""
    socket: zmq.Socket[bytes] = context.socket(kind)
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.SNDHWM, QUEUE_MESSAGES),
        (zmq.RCVHWM, QUEUE_MESSAGES),
        (zmq.MAXMSGSIZE, MAX_FRAME_BYTES if with_frames else MAX_MESSAGE_BYTES),
        (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
        (zmq.RECONNECT_IVL, 50),
        (zmq.RECONNECT_IVL_MAX, 1000),
    ):
        socket.setsockopt(option, value)
    if kind == zmq.ROUTER:
        # A peer that reconnects under the same identity replaces its dead connection.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if identity is not None:
        socket.setsockopt(zmq.ROUTING_ID, identity)
    if curve is not None:
        _secure(socket, curve)
    try:
        socket.bind(endpoint) if bind else socket.connect(endpoint)
    except zmq.ZMQError:
        socket.close(0)
        raise
    return Port(socket, accepts, with_frames=with_frames)


class SocketEvent(NamedTuple):
    kind: int
    """One of ZeroMQ's EVENT_ constants."""
    value: int


def socket_event(monitor: zmq.Socket[bytes]) -> SocketEvent:
    """The next event of a monitor. pyzmq's function for this imports asyncio, and every launch would wait for that."""
    return SocketEvent(*struct.unpack("=Hi", monitor.recv_multipart()[0]))


def _secure(socket: zmq.Socket[bytes], curve: Curve) -> None:
    socket.curve_publickey = curve.public
    socket.curve_secretkey = curve.secret
    if curve.server_key is None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, curve.domain)
        # Without this option, a CURVE_SERVER socket that has no ZAP handler accepts every client.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    else:
        socket.curve_serverkey = curve.server_key
