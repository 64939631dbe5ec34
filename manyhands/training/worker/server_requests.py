"""Requests parameter servers for a run that was started without: the launcher restarts the run with them.

A worker knows what the script needs only when the script creates its strategy, after its imports; and servers can be
started only together with the run. So the worker sends the number of servers through its lifeline, and waits to be
killed. Without an answer, as under a launcher of several hosts, the caller raises an error that says what to type.
"""

from __future__ import annotations

import contextlib
import os
import time

from manyhands.control.messages.lifeline_records import WantsServers, encode
from manyhands.control.session.session import was_opened
from manyhands.spec.worker_identity import WorkerIdentity

__all__ = ["ask_for_servers"]

ANSWER_WITHIN_S = 60.0


def ask_for_servers(identity: WorkerIdentity, servers: int, *, within_s: float = ANSWER_WITHIN_S) -> None:
    """Return only if this worker's launcher cannot start servers, or if the run is already under way."""
    if (
        identity.num_hosts > 1
        or identity.joining
        or identity.attempt > 1
        or identity.lifeline_fd is None
        or was_opened()
    ):
        return
    with contextlib.suppress(OSError):
        os.write(identity.lifeline_fd, encode(WantsServers(number=servers)))
        time.sleep(within_s)
