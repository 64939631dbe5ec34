"""What a job's run reports: its steps and their times by the number of workers, read from its events as they come.

Start reading at `RunProgress.read`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from manyhands.events import GenerationStarted, RunStarted, StepDone
from manyhands.observe.recorder import parse_line
from manyhands.planner.step_time import ObservedSteps

__all__ = ["ProgressReport", "RunProgress"]

# The first steps of a generation wait for its workers, and are no measure of the others.
UNMEASURED_STEPS = 2
MAX_BYTES = 4 * 2**20


class ProgressReport(msgspec.Struct, kw_only=True):
    """Since the last report."""

    workers: int
    step: int
    total_steps: int | None
    observed: tuple[ObservedSteps, ...]
    start_s: float | None
    rescale_s: float | None


class RunProgress:
    """Follows the events of one job from where they are now, over several starts of its run."""

    def __init__(self, run_dir: Path) -> None:
        self._agent, self._chief = (_Lines(run_dir / "events" / name) for name in ("agent-0.jsonl", "chief.jsonl"))
        self._sizes: dict[str, tuple[int, int]] = {}
        self._started_at: float | None = None
        self._generation, self._in_generation = "", 0
        self._last: StepDone | None = None
        self._workers, self._step = 0, 0
        self._total: int | None = None
        self._sums: dict[tuple[int, int], tuple[int, float]] = {}
        self._start_s: float | None = None
        self._rescale_s: float | None = None
        self._new = False
        self._chief.skip()

    def started(self, at: float) -> None:
        """Its run was started by this daemon at this time: the pause until its first step is measured."""
        self._started_at = at

    def read(self) -> ProgressReport | None:
        """News since the last report; None if there are none."""
        for line in self._agent.read():
            event = parse_line(line)
            if isinstance(event, GenerationStarted):
                self._sizes[event.generation] = event.hosts, event.workers
                self._new |= event.workers != self._workers
                self._workers = event.workers
        for line in self._chief.read():
            event = parse_line(line)
            if isinstance(event, RunStarted):
                self._total = event.total_steps
            elif isinstance(event, StepDone):
                self._take(event)
        return self._report() if self._new else None

    def _take(self, event: StepDone) -> None:
        self._new, self._step, self._total = True, event.step, event.total_steps or self._total
        if event.generation != self._generation:
            self._note_pause(event)
            self._generation, self._in_generation = event.generation, 0
        self._in_generation += 1
        size = self._sizes.get(event.generation)
        if size is not None and self._in_generation > UNMEASURED_STEPS and event.took_s > 0:
            steps, seconds = self._sums.get(size, (0, 0.0))
            self._sums[size] = steps + 1, seconds + event.took_s
        self._last = event

    def _note_pause(self, event: StepDone) -> None:
        if self._started_at is not None:
            self._start_s, self._started_at = max(0.0, event.time_s - self._started_at), None
        elif self._last is not None:
            self._rescale_s = max(0.0, event.time_s - self._last.time_s - self._last.took_s)

    def _report(self) -> ProgressReport:
        observed = tuple(ObservedSteps(*size, *sums) for size, sums in sorted(self._sums.items()))
        found = ProgressReport(
            workers=self._workers,
            step=self._step,
            total_steps=self._total,
            observed=observed,
            start_s=self._start_s,
            rescale_s=self._rescale_s,
        )
        self._new, self._sums, self._start_s, self._rescale_s = False, {}, None, None
        return found


class _Lines:
    """The whole lines that were added to a file since the last call; it need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def skip(self) -> None:
        """Leave out what is there."""
        try:
            self._offset = self._path.stat().st_size
        except OSError:
            self._offset = 0

    def read(self) -> Iterator[bytes]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(MAX_BYTES)
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        yield from whole.splitlines()
