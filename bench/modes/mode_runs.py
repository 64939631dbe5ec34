"""Runs of one mode to their end, in this process: what they used, the loss that they reached, and what a kill cost.

Workers are forked from one template for all runs (`shared_template`). Everything is read from the run's record.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import msgspec

from bench.driver.child import ScriptFailed
from manyhands.control.messages.failure import Failure, describe
from manyhands.errors import ManyhandsError
from manyhands.events import Evaluated, Event, Resumed, StalenessSeen, StepDone
from manyhands.launcher.launch import launch_command, make_request, place, script_command
from manyhands.observe.run_audit import audit, read_run_events
from manyhands.recipes.every_mode import Mode
from manyhands.spec.load import environment, resolve

__all__ = ["ELASTIC", "Kill", "Reached", "killed", "next_step", "reached"]

PROGRAM = "bench.modes.mode_program"
KILL_AT = 0.5625
"""Of the run's steps: in the middle between two checkpoints."""
ELASTIC = {"mirrored": 1, "servers_sync": 1, "servers_async": 1, "local_sgd": 1, "mesh": 2}
"""Modes whose other workers live on when one is killed, and how few may be left; the others restart as a whole."""


class Reached(NamedTuple):
    """A run without faults."""

    memory_bytes: int
    bytes_per_step: float
    loss: float
    accuracy: float
    staleness: float | None
    """Updates that a gradient had not seen, on average; None where there are no parameter servers."""


class Kill(NamedTuple):
    seconds: float
    """From the signal to the next committed step that was not under way."""
    steps_lost: int


class _Display:
    """Keeps failures, and kills the worker with the highest rank at a step."""

    def __init__(self, kill_at: float | None, run_dir: Path) -> None:
        self._kill_at, self._run_dir = kill_at, run_dir
        self.failed, self.killed_at, self.killed_after = "", 0.0, 0

    def event(self, event: Event) -> None:
        due = self._kill_at is not None and isinstance(event, StepDone) and event.total_steps
        if due and event.step / event.total_steps >= self._kill_at:
            self._kill_at, self.killed_at, self.killed_after = None, time.time(), event.step
            os.kill(int(max(self._run_dir.glob("pid-*")).read_text()), signal.SIGKILL)

    def output(self, rank: int, stream: Literal["stdout", "stderr"], data: bytes) -> None: ...

    def say(self, line: str) -> None: ...

    def failure(self, block: Failure) -> None:
        self.failed = self.failed or describe(block.first)

    def close(self) -> None: ...


def reached(mode: Mode, network: str, steps: int, folder: Path) -> Reached:
    events = _run(mode, network, steps, folder, _Display(None, folder))
    notes = [msgspec.json.decode(path.read_bytes(), type=_Note) for path in folder.glob("worker-*.json")]
    results = [event for event in events if isinstance(event, Evaluated)][-1].results
    seen: Counter[int] = Counter()
    for event in events:
        if isinstance(event, StalenessSeen):
            seen.update(event.updates)
    return Reached(
        max(note.memory_bytes for note in notes),
        fmean(note.handed_over / note.steps for note in notes),
        results["loss"],
        results["accuracy"],
        sum(late * count for late, count in seen.items()) / seen.total() if seen else None,
    )


def killed(mode: Mode, network: str, steps: int, folder: Path) -> Kill:
    """A worker, not the chief where there are several, is killed half-way."""
    display = _Display(KILL_AT, folder)
    flags = {"elastic": f"{ELASTIC[mode.name]}:{mode.workers}"} if mode.name in ELASTIC else {}
    events = _run(mode, network, steps, folder, display, flags)
    if not display.killed_at:
        raise ScriptFailed("the run ended before the kill")
    ledger = audit(events)
    if ledger.problems:
        raise ScriptFailed("; ".join(ledger.problems))
    steps_done = [event for event in events if isinstance(event, StepDone)]
    return Kill(next_step(steps_done, display.killed_at), max(ledger.steps_lost, _undone(events, display)))


def _undone(events: Sequence[Event], display: _Display) -> int:
    """Steps that a restart goes back, from the last one that was shown before the kill: its record may be lost."""
    resumed = [event.step for event in events if isinstance(event, Resumed) and event.time_s > display.killed_at]
    return max(0, display.killed_after - resumed[0]) if resumed else 0


class _Note(msgspec.Struct):
    memory_bytes: int
    handed_over: int
    steps: int


def next_step(steps: Sequence[StepDone], killed_at: float) -> float:
    """Seconds to the first step of a later generation; where none begins, to the end of the longest gap after the kill.

    Steps that were computed already when the signal arrived are committed right after it, and do not count.
    """
    generations = [step.generation for step in steps if step.time_s <= killed_at]
    current = generations[-1] if generations else ""
    later = [step.time_s for step in steps if step.time_s > killed_at and step.generation != current]
    if later:
        return min(later) - killed_at
    times = sorted(step.time_s for step in steps if step.time_s > killed_at)
    if not times:
        raise ScriptFailed("no step after the kill")
    gaps = zip([killed_at, *times], times, strict=False)
    return max(gaps, key=lambda gap: gap[1] - gap[0])[1] - killed_at


def _run(
    mode: Mode, network: str, steps: int, folder: Path, display: _Display, more: Mapping[str, Any] = {}
) -> list[Event]:
    flags: dict[str, Any] = {"workers": mode.workers, "threads": 1, "run_dir": str(folder), "ui": "none", **more}
    flags |= {"servers": mode.servers} if mode.servers else {}
    environ, command = environment(), script_command(PROGRAM, [network, mode.name, str(steps)], is_module=True)
    resolved = resolve(flags=flags, environ=environ)
    placement = place(resolved, environ)
    try:
        code = launch_command(
            make_request(resolved, command, placement, environ, run_dir=str(folder)), placement, display
        )
    except ManyhandsError as error:
        raise ScriptFailed(str(error).splitlines()[0]) from error
    if code in (75, 130, 143):
        raise KeyboardInterrupt
    if code:
        raise ScriptFailed(display.failed or f"exit code {code}")
    return read_run_events(folder)
