"""How soon a push is applied again after kill -9 of the only parameter server, in a real run of four workers.

Measured from the moment before the signal until a worker receives the first update that the dead server cannot have
made. The dead server may have applied at most one gradient of each worker without reporting it, so that many updates do
not count. Each kill waits until the run has a spare server again.
"""

from __future__ import annotations

import os
import signal
import time

from bench.recovery.commits import Commit
from bench.recovery.recovery import READY_S, RECOVER_S, SETTLED_STEPS, WORKERS, Struck, striking
from manyhands.control.servers.spare_server import READY
from manyhands.control.session.run_client import query

__all__ = ["first_after", "kills"]

FLAGS = ("--strategy", "parameter-server", "--servers", "1")
THINK_S = 0.01


def kills(num_kills: int) -> list[float]:
    with striking("bench.recovery.recovery_script", str(10**9), str(THINK_S), flags=FLAGS) as run:
        run.settled()
        return [_kill(run) for _ in range(num_kills)]


def _kill(run: Struck) -> float:
    run.until(lambda: _spare_is_ready(run), READY_S, "spare server")
    (server,) = query(run.run_dir).servers
    began = time.monotonic()
    os.kill(server.pid, signal.SIGKILL)
    received = max(commit.step for commit in run.commits())
    applied = run.until(lambda: first_after(run.commits(), received + WORKERS), RECOVER_S, "push after the kill")
    run.until(lambda: first_after(run.commits(), applied.step + SETTLED_STEPS), READY_S, "steps after that")
    return applied.at_s - began


def _spare_is_ready(run: Struck) -> bool | None:
    spare = query(run.run_dir).spare
    return (spare is not None and spare.status == READY) or None


def first_after(commits: list[Commit], step: int) -> Commit | None:
    """The first commit, by time, of any later step."""
    return next((commit for commit in commits if commit.step > step), None)
