"""An agent's line to the coordinator: local over ipc, remote over tcp with CURVE.

Messages queue while the coordinator is away and ZeroMQ reconnects by itself. For a host that joins, the socket's own
monitor tells "nobody there" from "they do not accept this key".
"""

from __future__ import annotations

import time
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from manyhands.comm.transport import Port, open_port
from manyhands.control.messages.agent_messages import FromCoordinator
from manyhands.control.security.keys import client_curve
from manyhands.errors import EnvironmentProblem, JoinRefused

__all__ = ["Link"]

# A run that accepts the key answers within milliseconds of the handshake; a refused handshake is tried again and again.
REFUSALS_BEFORE_GIVING_UP = 3


class Link:
    def __init__(self, context: zmq.Context[Any], endpoint: str, agent: str, key: bytes | None = None) -> None:
        curve = client_curve(key) if key is not None else None
        self.endpoint = endpoint
        self.port: Port[FromCoordinator] = open_port(
            context, zmq.DEALER, endpoint, FromCoordinator, identity=agent.encode(), curve=curve
        )
        self.heard_at = time.monotonic()
        self.ever_heard = False
        self._refused = 0
        self._monitor = self.port.socket.get_monitor_socket() if key is not None else None

    def send(self, message: Any) -> bool:
        return self.port.send(message)

    def receive(self) -> list[FromCoordinator]:
        messages = [message for _, message in self.port.receive()]
        if messages:
            self.heard_at, self.ever_heard = time.monotonic(), True
        return messages

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.heard_at

    def check_joining(self, timeout_s: float) -> None:
        """Before the first answer: raise when there will be none."""
        if self.ever_heard or self._monitor is None:
            return
        while self._monitor.poll(0):
            kind = recv_monitor_message(self._monitor)["event"]
            refused = (
                zmq.EVENT_HANDSHAKE_FAILED_AUTH,
                zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
                zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
            )
            self._refused += kind in refused
        if self._refused >= REFUSALS_BEFORE_GIVING_UP:
            raise JoinRefused(
                f"The run at {self.endpoint} refused this host's key.",
                fix=["the join file that this very run wrote", "the same MANYHANDS_KEY_FILE on every host"],
            )
        if self.silent_s > timeout_s:
            raise EnvironmentProblem(
                f"No run answered at {self.endpoint} within {timeout_s:g} s.", fix=["start the first host's `mh run`"]
            )

    def close(self) -> None:
        if self._monitor is not None:
            self.port.socket.disable_monitor()
            self._monitor.close(0)
        self.port.close(linger_ms=500)
