"""Rejects peers that may not connect to a listening run, and logs them at a limited rate, so that none floods the log.

CURVE rejects peers without the run's public key, ZAP those without its client key. The socket's monitor shows both,
and each is logged once per peer and reason.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import zmq
from zmq.utils import z85

from manyhands.comm.transport import Port, SocketEvent, socket_event

__all__ = ["PeerGate"]

NOTES_PER_MINUTE = 10
MAX_REMEMBERED = 1000

UNKNOWN = "an address that hung up at once"
NO_KEY = "no key, or it hung up before it showed one"
WRONG_KEY = "a wrong key, or another run's"

_MISMATCH = 0x11000002  # ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: it spoke without CURVE


class PeerGate:
    """Answers ZAP requests and reads the monitor; `attend` returns new log lines."""

    def __init__(self, context: zmq.Context[Any], allowed: bytes) -> None:
        """`allowed`: the public key, in Z85, of peers that may connect."""
        self._allowed = z85.decode(allowed)
        self._zap = context.socket(zmq.ROUTER)
        self._zap.linger = 0
        self._zap.bind("inproc://zeromq.zap.01")
        self._monitor: zmq.Socket[bytes] | None = None
        self._port: Port[Any] | None = None
        self._peers: dict[int, str] = {}
        self._pending: str | None = None
        self._nameless: dict[str, float] = {}
        self._logged: set[tuple[str, str]] = set()
        self._recent: list[float] = []
        self.refused = 0

    def watch(self, port: Port[Any]) -> None:
        self._port = port
        self._monitor = port.socket.get_monitor_socket()

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        return [self._zap] + ([self._monitor] if self._monitor is not None else [])

    def attend(self) -> list[str]:
        self._answer_zap()
        notes: list[str] = []
        while self._monitor is not None and self._monitor.poll(0):
            note = self._note(socket_event(self._monitor))
            if note is not None:
                notes.append(note)
        return notes + self._log_nameless()

    def _answer_zap(self) -> None:
        while self._zap.poll(0):
            frames = self._zap.recv_multipart()
            # [peer, empty, version, request id, domain, address, identity, mechanism, credentials...]
            known = len(frames) >= 9 and frames[7] == b"CURVE" and frames[8] == self._allowed
            answer = [b"200", b"OK"] if known else [b"400", b"not a member"]
            self._zap.send_multipart([*frames[:2], b"1.0", frames[3], *answer, b"agent" if known else b"", b""])

    def _note(self, event: SocketEvent) -> str | None:
        """Failures carry no peer; the disconnection that follows carries the descriptor that was accepted."""
        kind, value = event
        if kind == zmq.EVENT_ACCEPTED:
            self._peers[value] = _peer(value)
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._pending = NO_KEY if value == _MISMATCH else WRONG_KEY
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._pending = WRONG_KEY
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._pending = self._pending or NO_KEY  # it saw that a key is required, and hung up before we read one
        elif kind in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
            peer, reason, self._pending = self._peers.pop(value, UNKNOWN), self._pending, None
            if reason and peer == UNKNOWN:
                self._nameless.setdefault(reason, time.monotonic())
            elif reason:
                return self._refuse(peer, reason)
        return None

    def _log_nameless(self) -> list[str]:
        """Peers that hung up before their address was read. Most reconnect at once, and are then logged by address."""
        due = [reason for reason, at in self._nameless.items() if time.monotonic() - at > 1.0]
        for reason in due:
            del self._nameless[reason]
        known = {reason for _, reason in self._logged}
        return [note for reason in due if reason not in known and (note := self._refuse(UNKNOWN, reason))]

    def _refuse(self, peer: str, reason: str) -> str | None:
        self.refused += 1
        now = time.monotonic()
        self._recent = [at for at in self._recent if now - at < 60]
        if (
            (peer, reason) in self._logged
            or len(self._recent) >= NOTES_PER_MINUTE
            or len(self._logged) >= MAX_REMEMBERED
        ):
            return None
        self._logged.add((peer, reason))
        self._recent.append(now)
        return f"refused a join from {peer}: {reason}"

    def close(self) -> None:
        self._zap.close(0)
        if self._port is not None and self._monitor is not None:
            self._port.socket.disable_monitor()
            self._monitor.close(0)


def _peer(fd: int) -> str:
    """The address behind a descriptor that ZeroMQ owns; `UNKNOWN` when it is closed already."""
    try:
        with socket.socket(fileno=os.dup(fd)) as copy:
            return str(copy.getpeername()[0])
    except (OSError, IndexError):
        return UNKNOWN
