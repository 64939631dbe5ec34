"""The first part of `mh demo`: one network under every mode, each in a run of its own, compared with one process.

Workers of all runs are forked from one process that has imported torch. Each figure is from the record that a run
leaves: events, what its workers measured of themselves, and the saved weights. Imports no torch. Start reading at
`run_mode`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from manyhands.control.messages.failure import Failure, describe
from manyhands.errors import ManyhandsError
from manyhands.events import Evaluated, Event, StepDone
from manyhands.launcher.launch import launch_command, make_request, place, script_command
from manyhands.observe.run_audit import read_run_events
from manyhands.recipes.every_mode import PROGRAM, Mode, command_of
from manyhands.spec.load import environment, resolve

__all__ = ["TOLERANCE", "Interrupted", "ModeResult", "QuietDisplay", "distance", "rows_per_s", "run_mode"]

TOLERANCE = 1e-3
"""Relative: 230 steps of fp32 with additions in another order; two orders of magnitude above what was measured."""
CANNOT_RUN = (2, 3)
"""Exit codes of settings or machines that cannot do what a mode needs."""
INTERRUPTED = (75, 130, 143)


class Interrupted(Exception):
    """The user stopped a run."""

    def __init__(self, code: int) -> None:
        self.exit_code = 143 if code == 143 else 130


class Note(msgspec.Struct):
    """What a worker left in its file; see `recipes.every_strategy`."""

    memory_bytes: int
    handed_over: int
    steps: int


class ModeResult(msgspec.Struct, kw_only=True):
    mode: str
    workers: int
    servers: int
    command: str
    """What to type to run this mode alone."""
    run_dir: str
    not_run: str = ""
    """Why it cannot run here; empty: it can."""
    failed: str = ""
    rows_per_s: float | None = None
    memory_bytes: int | None = None
    bytes_per_step: float | None = None
    distance: float | None = None
    """Of the weights from those of one process; None for that process itself."""
    is_alike: bool = True
    """Whether the mode promises the weights of one process."""
    accuracy: float | None = None
    held_out: int = 0
    staleness: int | None = None
    """With parameter servers: by how many updates a gradient lagged at most."""

    @property
    def deviates(self) -> bool:
        return self.is_alike and self.distance is not None and not self.distance <= TOLERANCE

    @property
    def is_wrong(self) -> bool:
        return bool(self.failed) or self.deviates


class QuietDisplay:
    """Shows nothing of a run but its progress, by a function; keeps the first line of a failure."""

    def __init__(self, progress: Callable[[int, int], None]) -> None:
        self._progress = progress
        self.failed = ""

    def event(self, event: Event) -> None:
        if isinstance(event, StepDone) and event.total_steps:
            self._progress(event.step, event.total_steps)

    def output(self, rank: int, stream: Literal["stdout", "stderr"], data: bytes) -> None: ...

    def say(self, line: str) -> None: ...

    def failure(self, block: Failure) -> None:
        self.failed = self.failed or describe(block.first)

    def close(self) -> None: ...


def run_mode(mode: Mode, home: Path, progress: Callable[[int, int], None], arguments: Sequence[str] = ()) -> ModeResult:
    """Run it to its end, and read what it left. Raises `Interrupted`; any other failure is in the result."""
    run_dir, display = home / mode.name, QuietDisplay(progress)
    result = ModeResult(
        mode=mode.name,
        workers=mode.workers,
        servers=mode.servers,
        command=shlex.join(command_of(mode)),
        run_dir=str(run_dir),
        is_alike=mode.is_alike,
    )
    try:
        code = _launch(mode, run_dir, display, arguments)
    except ManyhandsError as error:
        code, display.failed = error.exit_code, str(error).splitlines()[0]
    if code in INTERRUPTED:
        raise Interrupted(code)
    if code:
        why = display.failed or f"exit code {code}; mh logs {run_dir}"
        result.not_run, result.failed = (why, "") if code in CANNOT_RUN else ("", why)
        return result
    _read(result, run_dir, home / "single")
    return result


def _launch(mode: Mode, run_dir: Path, display: QuietDisplay, arguments: Sequence[str]) -> int:
    flags: dict[str, Any] = {"workers": mode.workers, "threads": 1, "run_dir": str(run_dir), "ui": "none"}
    flags |= {"servers": mode.servers} if mode.servers else {}
    environ, command = environment(), script_command(PROGRAM, [mode.name, *arguments], is_module=True)
    resolved = resolve(flags=flags, environ=environ)
    placement = place(resolved, environ)
    request = make_request(resolved, command, placement, environ, run_dir=str(run_dir))
    return launch_command(request, placement, display)


def _read(result: ModeResult, run_dir: Path, single: Path) -> None:
    events = read_run_events(run_dir)
    notes = [msgspec.json.decode(path.read_bytes(), type=Note) for path in sorted(run_dir.glob("worker-*.json"))]
    steps = sorted((event for event in events if isinstance(event, StepDone)), key=lambda event: event.time_s)
    evaluated = [event for event in events if isinstance(event, Evaluated)]
    result.rows_per_s = rows_per_s(steps)
    result.memory_bytes = max((note.memory_bytes for note in notes), default=None)
    given = [note.handed_over / note.steps for note in notes if note.steps]
    result.bytes_per_step = sum(given) / len(given) if given else None
    result.accuracy, result.held_out = evaluated[-1].results["accuracy"], evaluated[-1].rows
    result.staleness = max((step.staleness for step in steps if step.staleness is not None), default=None)
    if run_dir != single and (single / "model.safetensors").exists():
        result.distance = distance(single / "model.safetensors", run_dir / "model.safetensors")


def rows_per_s(steps: Sequence[StepDone]) -> float | None:
    """Without the first quarter of the steps, in which caches fill and connections open."""
    timed = steps[len(steps) // 4 :]
    took_s = timed[-1].time_s - timed[0].time_s if len(timed) > 1 else 0.0
    return sum(step.rows for step in timed[1:]) / took_s if took_s > 0 else None


def distance(expected: Path, found: Path) -> float:
    """The largest difference of a weight, relative to the largest weight of its tensor; infinite if tensors differ."""
    from safetensors.numpy import load_file

    a: dict[str, NDArray[Any]] = load_file(expected)
    b: dict[str, NDArray[Any]] = load_file(found)
    if a.keys() != b.keys() or any(a[name].shape != b[name].shape for name in a):
        return float("inf")
    apart = (np.abs(a[name].astype(np.float64) - b[name]).max() / np.abs(a[name]).max() for name in a)
    return max((float(one) if np.isfinite(one) else float("inf") for one in apart), default=0.0)
