"""Measures what this worker uses while it trains: CPU time, memory, bytes sent, and seconds per phase of a step.

`ResourceMeter.add` is called once per step and only adds numbers up; every ten seconds and at the end of a call a few
small files of /proc are read. Start reading at `ResourceMeter.used`.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from manyhands.comm.handed_over import bytes_handed_over
from manyhands.events import ResourcesUsed
from manyhands.strategies.base import StepStats

__all__ = ["Predicted", "ResourceMeter", "held_bytes"]

EVERY_S = 10.0


class Predicted(Protocol):
    @property
    def total(self) -> int: ...
    @property
    def largest(self) -> str:
        """When the peak is reached: "start", "step" or "save"."""


class ResourceMeter:
    """Counts from `start` on, for one call of `fit` or one user loop."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.predicted: Predicted | None = None
        """The predicted memory peak of this worker, if the strategy has a memory limit."""
        self.move(rank, world_size)
        self.start()

    def move(self, rank: int, world_size: int) -> None:
        """This worker has another rank, or the run another number of workers, from now on."""
        self._rank, self._alone = rank, world_size == 1

    def start(self) -> None:
        self._started_at, self._cpu_s = time.perf_counter(), _cpu_s()
        self._due_at = self._started_at + EVERY_S
        self._steps = self._bytes_sent = self._slices = 0
        self._handed_over = bytes_handed_over()
        self._phases: dict[str, float] = {}

    def add(self, stats: StepStats, slices: int) -> None:
        """A step is done, of which this worker computed so many slices."""
        self._steps += 1
        self._slices += slices
        if not self._alone:  # a single worker sends nothing
            self._bytes_sent += stats.bytes_sent
        for phase, seconds in stats.seconds.items():
            self._phases[phase] = self._phases.get(phase, 0.0) + seconds

    def due(self, now: float) -> bool:
        """Whether it is time to report; if so, not again for ten seconds. `now` is `time.perf_counter()`."""
        if now < self._due_at:
            return False
        self._due_at = now + EVERY_S
        return True

    def used(self, step: int, *, ended: bool = False) -> ResourcesUsed | None:
        """The sums so far; None before the first step. With `ended`, also the PSS, which the kernel counts slowly."""
        if not self._steps:
            return None
        return ResourcesUsed(
            time_s=time.time(),
            rank=self._rank,
            step=step,
            steps=self._steps,
            seconds=time.perf_counter() - self._started_at,
            cpu_s=max(_cpu_s() - self._cpu_s, 0.0),
            peak_rss_bytes=_kib("/proc/self/status", "VmHWM:") or 0,
            pss_bytes=_kib("/proc/self/smaps_rollup", "Pss:") if ended else None,
            bytes_sent=self._bytes_sent,
            predicted_bytes=self.predicted.total if self.predicted is not None else None,
            predicted_phase=self.predicted.largest if self.predicted is not None else "",
            phases=dict(self._phases),
            handed_over=bytes_handed_over() - self._handed_over,
            slices=self._slices,
        )


def held_bytes() -> int:
    """The resident memory of this process."""
    return _kib("/proc/self/status", "VmRSS:") or 0


def _cpu_s() -> float:
    """CPU seconds of this process, of its loader processes, and of child processes that have ended."""
    sums = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    loaders = (_cpu_of(child.pid) for child in multiprocessing.active_children())
    return sum(used.ru_utime + used.ru_stime for used in sums) + sum(loaders)


def _cpu_of(pid: int | None) -> float:
    with suppress(OSError, ValueError, IndexError):
        # The name in parentheses may hold anything; utime and stime are the 14th and 15th field.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _kib(path: str, name: str) -> int | None:
    """A line "VmHWM:  1234 kB" of /proc, in bytes. getrusage's peak is no use: exec keeps that of the parent."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return None
