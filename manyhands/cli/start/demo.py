"""`mh demo`: trains on digits with 2 workers, kills one, stops half-way, resumes with 1, and reports."""

from __future__ import annotations

import os
import shlex
import signal
import time
from pathlib import Path
from typing import Any, Literal

import click

from manyhands import exact_json
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

__all__ = ["demo"]

EPOCHS = 15
KILL_AT, STOP_AT = 0.3, 0.5
"""Fractions of the run's steps."""
RECIPE = "manyhands.recipes.digits"


@click.command()
@click.option("--run-dir", type=click.Path(path_type=Path), help="The run directory. Default: runs/<time>-demo.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def demo(run_dir: Path | None, as_json: bool) -> int:
    """Train a small network on handwritten digits with 2 workers, kill one, stop, resume on 1 worker, report."""
    home = run_dir or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-demo"
    started = time.monotonic()
    _say(f"1. Two workers train on handwritten digits. Run directory: {home}", as_json)
    display = FaultyDisplay(_display(home, 2, as_json), quiet=as_json)
    code = _train(home, 2, display)
    if not display.has_stopped:
        return _interrupted(code, home)
    if code != 75:
        raise EnvironmentProblem(f"The first half ended with exit code {code}, not with 75.", fix=[f"mh logs {home}"])
    _say(f"3. SIGTERM has stopped the run at step {_last_checkpoint(home)}, with a checkpoint: exit code 75.", as_json)
    _say("4. One worker resumes there; the result is the same for any number of workers.", as_json)
    code = _train(home, 1, FaultyDisplay(_display(home, 1, as_json), quiet=as_json, kill_at=None, stop_at=None))
    if code != 0:
        return _interrupted(code, home)
    report = _report(home, time.monotonic() - started)
    click.echo(exact_json.encode(report) if as_json else _text(report))
    return 0


def _say(line: str, as_json: bool) -> None:
    """Print between two runs, when there is no progress bar on the terminal."""
    if not as_json:
        click.secho(line, bold=True, err=True)


def _interrupted(code: int, home: Path) -> int:
    """The exit code if the user stopped the run; raises if it failed, which it has reported already."""
    if code in (75, 130, 143):
        return 143 if code == 143 else 130
    raise EnvironmentProblem(f"The run ended with exit code {code}.", fix=[f"mh logs {home}"])


class FaultyDisplay:
    """A display that also injects faults: it kills a worker, and later stops the run.

    It runs in the launcher's process, so that its lines appear above the progress bar.
    """

    def __init__(
        self, inner: Display, *, quiet: bool, kill_at: float | None = KILL_AT, stop_at: float | None = STOP_AT
    ) -> None:
        self._inner, self._quiet = inner, quiet
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
            self.say(f"2. kill -9 {victim}: one worker is dead. The other continues, and a replacement starts.")
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
    return {"workers": workers, "run_dir": str(home), **({"elastic": "1:2"} if workers > 1 else {})}


def _display(home: Path, workers: int, as_json: bool) -> Display:
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


def _report(home: Path, seconds: float) -> dict[str, Any]:
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
        "seconds": round(seconds, 1),
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


def _text(report: dict[str, Any]) -> str:
    first, second, killed = report["workers"][0], report["workers"][-1], report["killed"]
    joined = "another joined" if killed["replaced"] else "another was starting when the run was stopped"
    audited = "; ".join(report["problems"]) or (
        f"{report['steps_done_twice']} steps done twice, {report['samples_lost']} samples lost, "
        f"{report['samples_repeated']} repeated"
    )
    return "\n".join(
        [
            "",
            f"What happened: {report['steps']} steps in {report['slices']} slices each, the first "
            f"{report['stopped_and_resumed_at']} by {first} workers (until one was killed), the rest by {second}; "
            f"{audited}.",
            f"Killed: rank {killed['rank']} (pid {killed['pid']}). {killed['went_on_after_s']:.2f} s after it was "
            f"detected, step {killed['next_step']} was committed without that worker; {joined}.",
            f"Held-out digits: {report['accuracy']:.2%} of {report['examples_evaluated']} correct, each counted once.",
            f"It took {report['seconds']} s. Everything is in {report['run_dir']}:",
            f"  mh status {report['run_dir']}",
            f"  mh ckpt ls {report['run_dir']}",
            f"  mh logs {report['run_dir']}",
        ]
    )
