"""Tells watchers which workers are slow, which ones keep up again, and how slices are divided from now on.

What is slow is `straggler_tracking`'s business. Start reading at `report_pace`.
"""

from __future__ import annotations

import contextlib
import socket
import time

from manyhands.errors import ManyhandsError
from manyhands.events import Divided, Straggler
from manyhands.launcher.solo_run import Solo
from manyhands.parallel.replicas.straggler_detection import Slow
from manyhands.training.step.straggler_tracking import Verdict
from manyhands.training.worker.worker import Worker

__all__ = ["report_pace"]

# A worker on another host says what that is called, once it is told to be slow.
HOST_NAME_TIMEOUT_S = 2.0


def report_pace(worker: Worker, step: int, verdict: Verdict) -> None:
    """For all workers alike: the chief tells, and those on other hosts say what it needs for that."""
    for slow in verdict.slow:
        _tell_slow(worker, step, slow, is_over=False)
    for slow in verdict.keeps_up:
        _tell_slow(worker, step, slow, is_over=True)
    if verdict.parts is not None:
        worker.emit(Divided(time_s=time.time(), step=step, slices=list(verdict.parts)))


def _tell_slow(worker: Worker, step: int, slow: Slow, *, is_over: bool) -> None:
    # Times are compared between replicas; where a replica has several workers, its number is no rank.
    rank = worker.rank_in(slow.rank)
    host = _host_name(worker, rank)
    if worker.is_chief:
        worker.emit(
            Straggler(
                time_s=time.time(),
                rank=rank,
                host=host,
                phase=slow.phase,
                factor=slow.factor,
                step=step,
                waiting=slow.waiting,
                is_over=is_over,
                generation=worker.group.generation,
            )
        )


def _host_name(worker: Worker, rank: int) -> str:
    """Of a worker, for the chief: one on another host has to say it, and does so here."""
    hosts = worker.group.hosts
    if isinstance(worker.session, Solo) or hosts[rank] == hosts[0]:
        return socket.gethostname()
    key = f"host name/{worker.group.generation}/{hosts[rank]}"
    with contextlib.suppress(ManyhandsError):  # it is the name that is missing then, and nothing else
        if worker.rank == rank:
            worker.session.set(key, socket.gethostname().encode())
        elif worker.is_chief:
            return worker.session.get(key, HOST_NAME_TIMEOUT_S).decode()
    return f"host {hosts[rank]}"
