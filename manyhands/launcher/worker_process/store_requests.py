"""Asks the agent to open a TCPStore before the user's code connects to it: only then a port listens at MASTER_PORT.

Every Python call that makes such a store (`init_process_group`, a rendezvous, a `TCPStore`) uses the one constructor
that is wrapped here. Other uses, such as in child processes, find the store open after a while anyway. Start reading
at `request_before_connecting`.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

from manyhands.launcher.worker_process.import_hooks import after_import

__all__ = ["request_before_connecting"]

# The agent listens within milliseconds; on another host as soon as a worker there asks. torch itself keeps retrying.
OPEN_WITHIN_S = 3.0
TRY_EVERY_S = 0.01


def request_before_connecting(port: int | None, request: Callable[[], None]) -> None:
    """Call `request` before this process first connects to a store at `port`, and wait until it is open."""
    requested = False

    def open_first(host: str, at: int) -> None:
        nonlocal requested
        if at == port and not requested:
            requested = True
            request()
            _wait_until_open(host, at)

    def wrap(rendezvous: ModuleType) -> None:
        kind = rendezvous.TCPStore
        construct = kind.__init__

        @functools.wraps(construct)
        def construct_when_open(store: Any, *args: Any, **named: Any) -> None:
            with suppress(Exception):  # torch reports wrong arguments itself
                open_first(*_address(*args, **named))
            construct(store, *args, **named)

        kind.__init__ = construct_when_open

    after_import("torch.distributed.rendezvous", wrap)


def _address(host_name: str, port: int, *_args: Any, **_named: Any) -> tuple[str, int]:
    """The address of a TCPStore with these arguments."""
    return host_name, port


def _wait_until_open(host: str, port: int) -> None:
    """torch would wait longer than necessary between its first attempts."""
    deadline = time.monotonic() + OPEN_WITHIN_S
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((host, port), timeout=OPEN_WITHIN_S):
            return
        time.sleep(TRY_EVERY_S)
