"""Heartbeats between a cluster's worker and its hub, sent and received by a separate thread."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import zmq

from manyhands.comm.transport import Curve, Port, open_port
from manyhands.dispatch.messages import Alive

__all__ = ["HeartbeatThread"]

ALIVE_EVERY_S = 1.0


class HeartbeatThread:
    """Sends a heartbeat every second, also while a step runs, and checks the cluster's replies."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        curve: Curve | None,
        token: bytes,
        silent_s: float,
        disconnects: zmq.Socket[bytes],
    ) -> None:
        """`disconnects` becomes readable when the worker's main connection is lost."""
        self._port: Port[Alive] = open_port(context, zmq.DEALER, address, Alive, curve=curve)
        self._disconnects, self._token, self._silent_s = disconnects, token, silent_s
        self.lost = ""
        """Why this worker is no longer in the cluster; empty while it is."""
        self._sent_at = 0.0
        self._received_at = time.monotonic()
        self._wake, self._closing = os.eventfd(0, os.EFD_CLOEXEC), False
        self._thread = threading.Thread(target=self._run, name="manyhands-dispatch-pulse", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        for readable in (self._port.socket, self._disconnects, self._wake):
            poller.register(readable, zmq.POLLIN)
        while not self._closing and not self.lost:
            self._beat(time.monotonic())
            if self._disconnects in dict(poller.poll(round(ALIVE_EVERY_S * 1000))):
                self.lost = "its connection to the cluster was lost."
        self._port.close()

    def _beat(self, now: float) -> None:
        if now - self._sent_at >= ALIVE_EVERY_S:
            self._port.send(Alive(worker=self._token))
            self._sent_at = now
        for _, message in self._port.receive():
            self._received_at = now
            if not message.known:
                self.lost = "the cluster has dropped it and continues without it."
        if now - self._received_at > self._silent_s:
            self.lost = f"the cluster sent nothing for {self._silent_s:g} s."

    def close(self) -> None:
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
