"""The second part of `mh demo`: two workers train, one is killed, the run is stopped half-way and resumed with one."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

from manyhands.cli.start.demo_modes import INTERRUPTED, Interrupted
from manyhands.cli.start.demo_narration import NarratingDisplay
from manyhands.cli.start.demo_texts import Texts
from manyhands.control.messages.failure import Failure
from manyhands.control.messages.launch_request import Display
from manyhands.errors import EnvironmentProblem
from manyhands.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    GenerationStarted,
    Resumed,
    RunStarted,
    StepDone,
    WorkerLost,
    WorkerStarted,
)
from manyhands.launcher.launch import launch_command, make_request, open_display, place, script_command
from manyhands.observe.run_audit import audit, generation_key, read_run_events
from manyhands.spec.load import environment, resolve

__all__ = ["FaultyDisplay", "kill_and_resume", "summary"]

EPOCHS = 15
KILL_AT, STOP_AT = 0.3, 0.5
"""Fractions of the run's steps."""
RECIPE = "manyhands.recipes.digits"


class Talk(Protocol):
    """Prints a line between runs, a line of a run, and a line of progress that the next one replaces."""

    texts: Texts

    def say(self, line: str) -> None: ...
    def run_line(self, line: str) -> None: ...
    def progress_line(self, line: str) -> None: ...


def kill_and_resume(home: Path, talk: Talk, *, as_json: bool) -> dict[str, Any]:
    """Run both halves; returns the report."""
    texts = talk.texts
    talk.say(texts.kill_title.format(home=home))
    announce = talk.run_line if texts.events else None
    display = FaultyDisplay(_display(home, 2, talk, as_json), texts, quiet=as_json, announce=announce)
    code = _train(home, 2, display)
    if not display.has_stopped:
        raise _ended_early(code, home, texts)
    if code != 75:
        raise EnvironmentProblem(texts.first_half.format(code=code), fix=[f"mh logs {home}"])
    talk.say(texts.stopped.format(step=_last_checkpoint(home)))
    talk.say(texts.resumes)
    inner = _display(home, 1, talk, as_json)
    code = _train(home, 1, FaultyDisplay(inner, texts, quiet=as_json, kill_at=None, stop_at=None))
    if code != 0:
        raise _ended_early(code, home, texts)
    return _report(home)


def _ended_early(code: int, home: Path, texts: Texts) -> Exception:
    if code in INTERRUPTED:
        return Interrupted(code)
    return EnvironmentProblem(texts.ended.format(code=code), fix=[f"mh logs {home}"])


class FaultyDisplay:
    """A display that also injects faults: it kills a worker, and later stops the run.

    It runs in the launcher's process, so that its lines appear above the progress bar.
    """

    def __init__(
        self,
        inner: Display,
        texts: Texts,
        *,
        quiet: bool,
        kill_at: float | None = KILL_AT,
        stop_at: float | None = STOP_AT,
        announce: Callable[[str], None] | None = None,
    ) -> None:
        self._inner, self._texts, self._quiet = inner, texts, quiet
        self._announce = announce or inner.say
        self._kill_at, self._stop_at = kill_at, stop_at
        self._pids: dict[int, int] = {}
        self.has_stopped = False

    def event(self, event: Event) -> None:
        self._inner.event(event)
        if isinstance(event, WorkerStarted):
            self._pids[event.slot] = event.pid
        if isinstance(event, StepDone) and event.total_steps:
            self._inject(event.step / event.total_steps)

    def _inject(self, share: float) -> None:
        if self._kill_at is not None and share >= self._kill_at:
            self._kill_at, victim = None, self._pids[max(self._pids)]
            os.kill(victim, signal.SIGKILL)
            self._announce(self._texts.killed.format(pid=victim))
        elif self._stop_at is not None and share >= self._stop_at:
            self._stop_at, self.has_stopped = None, True
            os.kill(os.getpid(), signal.SIGTERM)

    def output(self, rank: int, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        if not self._quiet:
            self._inner.output(rank, stream, data)

    def say(self, line: str) -> None:
        self._inner.say(line)

    def failure(self, block: Failure) -> None:
        self._inner.failure(block)

    def close(self) -> None:
        self._inner.close()


def _settings(home: Path, workers: int) -> dict[str, Any]:
    several = {"elastic": "1:2"} if workers > 1 else {}
    return {"workers": workers, "threads": 1, "run_dir": str(home), **several}


def _display(home: Path, workers: int, talk: Talk, as_json: bool) -> Display:
    if talk.texts.events:
        return NarratingDisplay(talk.texts.events, talk.run_line, talk.progress_line, quiet=as_json)
    ui = {"ui": "none"} if as_json else {}
    return open_display(resolve(flags=_settings(home, workers) | ui), environment())


def _train(home: Path, workers: int, display: Display) -> int:
    """Run the digits recipe with the launcher in this process, as `mh run` does; returns the run's exit code."""
    environ, command = environment(), script_command(RECIPE, ["--epochs", str(EPOCHS)], is_module=True)
    resolved = resolve(flags=_settings(home, workers), environ=environ)
    placement = place(resolved, environ)
    words = ["mh", "run", "-n", str(workers), "--run-dir", str(home), "-m", RECIPE, *command.args]
    request = make_request(resolved, command, placement, environ, run_dir=str(home), resume=shlex.join(words))
    return launch_command(request, placement, display)


def _last_checkpoint(home: Path) -> int:
    return max(event.step for event in read_run_events(home) if isinstance(event, CheckpointSaved))


def _report(home: Path) -> dict[str, Any]:
    events = read_run_events(home)
    runs = [event for event in events if isinstance(event, RunStarted)]
    resumed = [event for event in events if isinstance(event, Resumed)]
    evaluated = [event for event in events if isinstance(event, Evaluated)]
    ledger = audit(events)
    return {
        "run_dir": str(home),
        "workers": [run.workers for run in runs],
        "slices": runs[-1].slices,
        "steps": ledger.last_step,
        "steps_done_twice": ledger.steps_lost,
        "samples_lost": ledger.samples_lost,
        "samples_repeated": ledger.samples_repeated,
        "problems": ledger.problems,
        "killed": _recovery(events),
        "stopped_and_resumed_at": resumed[-1].step,
        "examples_evaluated": evaluated[-1].rows,
        "accuracy": evaluated[-1].results["accuracy"],
        "loss": evaluated[-1].results["loss"],
    }


def _recovery(events: list[Event]) -> dict[str, Any]:
    """When the killed worker was lost, and the first step that was committed without it."""
    lost = next(event for event in events if isinstance(event, WorkerLost))
    newer = next(one for one in events if isinstance(one, GenerationStarted) and one.time_s >= lost.time_s)
    steps = sorted((event for event in events if isinstance(event, StepDone)), key=lambda step: step.time_s)
    after = next(step for step in steps if generation_key(step.generation) >= generation_key(newer.generation))
    return {
        "pid": lost.pid,
        "rank": lost.rank,
        "reason": lost.reason,
        "next_step": after.step,
        "went_on_after_s": round(after.time_s - lost.time_s, 3),
        "replaced": any(isinstance(one, GenerationStarted) and one.workers == 2 for one in _later(events, newer)),
    }


def _later(events: list[Event], than: Event) -> list[Event]:
    return [event for event in events if event.time_s > than.time_s]


def summary(report: dict[str, Any], texts: Texts) -> str:
    killed = report["killed"]
    audited = "; ".join(report["problems"]) or texts.no_problems.format(
        twice=report["steps_done_twice"], lost=report["samples_lost"], repeated=report["samples_repeated"]
    )
    return texts.summary.format(
        steps=report["steps"],
        slices=report["slices"],
        stopped=report["stopped_and_resumed_at"],
        first=report["workers"][0],
        second=report["workers"][-1],
        audited=audited,
        rank=killed["rank"],
        pid=killed["pid"],
        after=killed["went_on_after_s"],
        next_step=killed["next_step"],
        joined=texts.joined if killed["replaced"] else texts.joining,
        accuracy=report["accuracy"],
        examples=report["examples_evaluated"],
    )
