"""Tell the agent before the user's code connects to its TCPStore: only then does anything listen at MASTER_PORT.

Every way from Python to that store (`init_process_group`, a rendezvous, a store made by hand) goes through the one
constructor that is wrapped here. Ways that do not, child processes for instance, find it open after a while anyway.
Start reading at `tell_of_stores`.
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

__all__ = ["tell_of_stores"]

# The agent listens within milliseconds; on another host as soon as a worker there asks. torch itself goes on trying.
OPEN_WITHIN_S = 3.0
TRY_EVERY_S = 0.01


def tell_of_stores(port: int | None, tell: Callable[[], None]) -> None:
    """From now on, `tell` before this process first connects to a store at `port`, and wait until it is open."""
    told = False

    def open_first(host: str, at: int) -> None:
        nonlocal told
        if at == port and not told:
            told = True
            tell()
            _wait_until_open(host, at)

    def wrap(rendezvous: ModuleType) -> None:
        kind = rendezvous.TCPStore
        construct = kind.__init__

        @functools.wraps(construct)
        def construct_when_open(store: Any, *args: Any, **named: Any) -> None:
            with suppress(Exception):  # of wrong arguments torch complains itself
                open_first(*_place(*args, **named))
            construct(store, *args, **named)

        kind.__init__ = construct_when_open

    after_import("torch.distributed.rendezvous", wrap)


def _place(host_name: str, port: int, *_args: Any, **_named: Any) -> tuple[str, int]:
    """Where a TCPStore with these arguments is."""
    return host_name, port


def _wait_until_open(host: str, port: int) -> None:
    """torch would wait for longer than necessary between its first attempts."""
    deadline = time.monotonic() + OPEN_WITHIN_S
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((host, port), timeout=OPEN_WITHIN_S):
            return
        time.sleep(TRY_EVERY_S)
