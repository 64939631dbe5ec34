"""What a worker of `mh profile` does besides training: it writes the times of each step, and may record a few of them.

An observer of committed steps. Start reading at `StepRecorder`.
"""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from manyhands.data.batches import Step
from manyhands.parallel.replicas.phase_timer import Phases
from manyhands.profiling.layer_times import LayerTime, layer_ranges, layer_times
from manyhands.profiling.step_records import TRACE_NAME, StepTimes, WorkerFacts, record_path
from manyhands.profiling.trace_file import PhaseSpan, WorkerTrace
from manyhands.spec.probe_requests import ProfileOrder
from manyhands.strategies.base import StepStats

__all__ = ["RecordedSteps", "StepRecorder"]


class RecordedSteps(msgspec.Struct, frozen=True):
    """What a worker writes of the steps that torch's profiler recorded."""

    trace: WorkerTrace
    layers: list[LayerTime]
    steps: int


class HasPhases(Protocol):
    """An engine, of which the recorder uses its phases only."""

    phases: Phases


class StepRecorder:
    """An observer of committed steps: writes a line for each, and records the steps of `order.trace`."""

    def __init__(
        self, order: ProfileOrder, facts: WorkerFacts, run_dir: Path, model: nn.Module, engine: HasPhases
    ) -> None:
        self._order, self._facts, self._run_dir, self._model, self._engine = order, facts, run_dir, model, engine
        self._encode = msgspec.json.Encoder().encode
        self._count, self._done_at = 0, time.perf_counter()
        self._file = record_path(run_dir, facts.rank).open("ab", buffering=0)
        self._file.write(self._encode(facts) + b"\n")
        self._recording: _Recording | None = None
        self._follow_trace()

    def step_done(self, step: Step, stats: StepStats) -> None:
        now = time.perf_counter()
        took_s, self._done_at = now - self._done_at, now
        self._count += 1
        times = [list(map(float, rank)) for rank in stats.times]
        slices = 0 if self._facts.leases else len(step.indices)
        self._file.write(self._encode(StepTimes(step.number, took_s, dict(stats.seconds), times, slices)) + b"\n")
        self._follow_trace()

    def _follow_trace(self) -> None:
        """Start and end torch's profiler between the steps that were asked for."""
        if self._order.trace is None:
            return
        first, last = self._order.trace
        if self._count == first - 1:
            self._recording = _Recording(self._model, self._engine)
        elif self._count == last and self._recording is not None:
            recorded = self._recording.end(self._facts.rank, last - first + 1, self._run_dir)
            path = self._run_dir / TRACE_NAME.format(rank=self._facts.rank)
            unfinished = path.with_suffix(".unfinished")
            unfinished.write_bytes(self._encode(recorded))
            unfinished.rename(path)
            self._recording = None
        self._done_at = time.perf_counter()


class _Recording:
    def __init__(self, model: nn.Module, engine: HasPhases) -> None:
        self._model, self._engine, self._before = model, engine, engine.phases
        self._phases = engine.phases = _SpannedPhases()
        self._open = ExitStack()
        with _profiler():  # the first use sets up what the profiler needs, which would count for the first layer
            torch.ones(1).add(1)
        self._profile: Any = self._open.enter_context(_profiler())
        self._open.enter_context(layer_ranges(model))

    def end(self, rank: int, steps: int, folder: Path) -> RecordedSteps:
        self._open.close()
        self._engine.phases = self._before
        exported = folder / f"exported-{rank}.json"
        self._profile.export_chrome_trace(str(exported))
        trace = msgspec.json.decode(exported.read_bytes())
        exported.unlink()
        layers = layer_times(self._profile.events(), self._model, steps)
        return RecordedSteps(WorkerTrace(rank, os.getpid(), trace, self._phases.spans), layers, steps)


def _profiler() -> AbstractContextManager[Any]:
    return profile(activities=[ProfilerActivity.CPU])


class _SpannedPhases(Phases):
    """Keeps when each phase began and ended, by the wall clock."""

    def __init__(self) -> None:
        self.spans: list[PhaseSpan] = []
        super().__init__()

    def begin(self, *args: Any, **kwargs: Any) -> None:
        super().begin(*args, **kwargs)
        self._marked_ns = time.time_ns()
        load_ns = int(1e9 * self.seconds["load"])
        if load_ns:
            self.spans.append(PhaseSpan("load", self._marked_ns - load_ns, self._marked_ns))

    def mark(self, phase: str) -> None:
        super().mark(phase)
        now_ns = time.time_ns()
        self.spans.append(PhaseSpan(phase, self._marked_ns, now_ns))
        self._marked_ns = now_ns
