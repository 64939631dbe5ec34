"""One trace of all workers, on one clock, in the format that Perfetto and chrome://tracing open.

Each worker's profiler writes its times as microseconds since a moment of its own, and says which moment that was.
Workers of one host have the same wall clock, so shifting each file by the difference of these moments puts all on one
axis. Start reading at `merge`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

__all__ = ["PhaseSpan", "WorkerTrace", "merge"]

PHASES_TRACK = 1
"""Number of the track of phases in each worker's process; threads have larger ones."""


class PhaseSpan(msgspec.Struct, frozen=True, array_like=True):
    name: str
    start_ns: int
    """By the wall clock, since 1970."""
    stop_ns: int


class WorkerTrace(msgspec.Struct, frozen=True):
    rank: int
    pid: int
    trace: dict[str, Any]
    """As torch's profiler exports it."""
    phases: list[PhaseSpan]


def merge(workers: Sequence[WorkerTrace]) -> dict[str, Any]:
    """A trace whose times begin with the first worker's; a process for each worker, named by its rank."""
    base_ns = min(_starts_ns(worker) for worker in workers)
    events = [event for worker in workers for event in _of_worker(worker, base_ns)]
    return {"displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns, "traceEvents": events}


def _starts_ns(worker: WorkerTrace) -> int:
    starts = [
        float(event["ts"])
        for event in worker.trace.get("traceEvents", ())
        if event.get("pid") == worker.pid and "ts" in event
    ]
    recorded = [_base_ns(worker) + int(1000 * min(starts))] if starts else []
    return min([*recorded, *(span.start_ns for span in worker.phases)], default=_base_ns(worker))


def _base_ns(worker: WorkerTrace) -> int:
    return int(worker.trace.get("baseTimeNanoseconds", 0))


def _of_worker(worker: WorkerTrace, base_ns: int) -> list[dict[str, Any]]:
    shift_us = (_base_ns(worker) - base_ns) / 1000
    named = {"name": f"worker {worker.rank}"}
    found: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": worker.pid, "tid": 0, "args": named},
        {"ph": "M", "name": "process_sort_index", "pid": worker.pid, "tid": 0, "args": {"sort_index": worker.rank}},
        {"ph": "M", "name": "thread_name", "pid": worker.pid, "tid": PHASES_TRACK, "args": {"name": "phases"}},
        {"ph": "M", "name": "thread_sort_index", "pid": worker.pid, "tid": PHASES_TRACK, "args": {"sort_index": -1}},
    ]
    for span in worker.phases:
        start, length = (span.start_ns - base_ns) / 1000, (span.stop_ns - span.start_ns) / 1000
        place = {"pid": worker.pid, "tid": PHASES_TRACK}
        found.append({"ph": "X", "cat": "phase", "name": span.name, "ts": start, "dur": length, **place})
    for event in worker.trace.get("traceEvents", ()):
        if event.get("pid") != worker.pid or event.get("name") in ("process_name", "process_sort_index"):
            continue  # the profiler's lists of its own, and its name of the process
        found.append({**event, "ts": float(event["ts"]) + shift_us} if "ts" in event else event)
    return found
