"""An agent's connection to the coordinator: local over ipc, remote over tcp with CURVE.

Messages queue while the coordinator is unreachable, and ZeroMQ reconnects. For a joining host, the socket's monitor
shows whether no run listens there, or the run does not accept this key.
"""

from __future__ import annotations

import time
from typing import Any

import zmq

from manyhands.comm.transport import Port, open_port, socket_event
from manyhands.control.messages.agent_messages import FromCoordinator
from manyhands.control.security.keys import client_curve
from manyhands.errors import EnvironmentProblem, JoinRefused

__all__ = ["CoordinatorLink"]

# A run that accepts the key answers within milliseconds of the handshake; ZeroMQ retries a refused one again and again.
REFUSALS_BEFORE_GIVING_UP = 3


class CoordinatorLink:
    def __init__(self, context: zmq.Context[Any], endpoint: str, agent: str, key: bytes | None = None) -> None:
        curve = client_curve(key) if key is not None else None
        self.endpoint = endpoint
        self.port: Port[FromCoordinator] = open_port(
            context, zmq.DEALER, endpoint, FromCoordinator, identity=agent.encode(), curve=curve
        )
        self.received_at = time.monotonic()
        self.has_received = False
        self._refused = 0
        self._monitor = self.port.socket.get_monitor_socket() if key is not None else None

    def send(self, message: Any) -> bool:
        return self.port.send(message)

    def receive(self) -> list[FromCoordinator]:
        messages = [message for _, message in self.port.receive()]
        if messages:
            self.received_at, self.has_received = time.monotonic(), True
        return messages

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.received_at

    def check_joining(self, timeout_s: float) -> None:
        """Before the first answer: raise if none can be expected."""
        if self.has_received or self._monitor is None:
            return
        while self._monitor.poll(0):
            kind = socket_event(self._monitor).kind
            refused = (
                zmq.EVENT_HANDSHAKE_FAILED_AUTH,
                zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
                zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
            )
            self._refused += kind in refused
        if self._refused >= REFUSALS_BEFORE_GIVING_UP:
            raise JoinRefused(
                f"The run at {self.endpoint} refused this host's key.",
                fix=["the join file that this run wrote", "the same MANYHANDS_KEY_FILE on every host"],
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
