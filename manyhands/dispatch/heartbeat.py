"""The sign of life that a worker of a cluster gives, from a thread of its own, and what it hears back."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import zmq

from manyhands.comm.tensor_messages import ParcelPort, open_parcel_port
from manyhands.comm.transport import Curve
from manyhands.dispatch.messages import Alive

__all__ = ["Pulse"]

ALIVE_EVERY_S = 1.0


class Pulse:
    """Says every second that this process is alive, also while a step is busy, and hears whether the cluster is."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        curve: Curve | None,
        token: bytes,
        silent_s: float,
        cut: zmq.Socket[bytes],
    ) -> None:
        """`cut` has something to read when the worker's first connection is lost."""
        self._port: ParcelPort[Alive] = open_parcel_port(context, zmq.DEALER, address, Alive, curve=curve)
        self._cut, self._token, self._silent_s = cut, token, silent_s
        self.lost = ""
        """Why this worker is not in the cluster any more."""
        self._said = 0.0
        self._heard = time.monotonic()
        self._wake, self._closing = os.eventfd(0, os.EFD_CLOEXEC), False
        self._thread = threading.Thread(target=self._run, name="manyhands-dispatch-pulse", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        for readable in (self._port.socket, self._cut, self._wake):
            poller.register(readable, zmq.POLLIN)
        while not self._closing and not self.lost:
            self._beat(time.monotonic())
            if self._cut in dict(poller.poll(round(ALIVE_EVERY_S * 1000))):
                self.lost = "its connection to the cluster was cut."
        self._port.close()

    def _beat(self, now: float) -> None:
        if now - self._said >= ALIVE_EVERY_S:
            self._port.send(Alive(worker=self._token))
            self._said = now
        for _, message, _ in self._port.receive():
            self._heard = now
            if not message.known:
                self.lost = "the cluster has gone on without it."
        if now - self._heard > self._silent_s:
            self.lost = f"nothing was heard of the cluster for {self._silent_s:g} s."

    def close(self) -> None:
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
