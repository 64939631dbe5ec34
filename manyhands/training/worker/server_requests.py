"""A script asks for parameter servers in a run that was started without: its launcher starts it again with them.

A worker learns what the script wants only when the script says so, after its imports; and a run gets its servers when
it starts, or never. So the worker sends the number through its lifeline, and waits to be killed. Where no answer
comes, as under a launcher of several hosts, the caller refuses the script and says what to type.
"""

from __future__ import annotations

import contextlib
import os
import time

from manyhands.control.messages.lifeline_records import WantsServers, encode
from manyhands.control.session.session import was_opened
from manyhands.spec.worker_identity import Seat

__all__ = ["ask_for_servers"]

ANSWER_WITHIN_S = 60.0


def ask_for_servers(seat: Seat, servers: int, *, within_s: float = ANSWER_WITHIN_S) -> None:
    """Returns only where this worker's launcher cannot start servers, or where the run is under way already."""
    if seat.num_hosts > 1 or seat.joining or seat.attempt > 1 or seat.lifeline_fd is None or was_opened():
        return
    with contextlib.suppress(OSError):
        os.write(seat.lifeline_fd, encode(WantsServers(number=servers)))
        time.sleep(within_s)
