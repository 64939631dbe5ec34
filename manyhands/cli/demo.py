"""`mh demo`: train on digits with 2 workers, kill one, stop half-way, go on with 1, and say what happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from manyhands import exact_json
from manyhands.control.client import query
from manyhands.errors import EnvironmentProblem, UsageError
from manyhands.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    GenerationStarted,
    Resumed,
    RunStarted,
    StepDone,
    WorkerLost,
)
from manyhands.runtime.ledger import audit, generation_key, read_run_events

__all__ = ["demo"]

EPOCHS = 15
KILL_AT, STOP_AT = 0.3, 0.5
"""Shares of the run's steps."""
DEADLINE_S = 300.0


@click.command()
@click.option("--run-dir", type=click.Path(path_type=Path), help="Where the run goes. Default: runs/<time>-demo.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def demo(run_dir: Path | None, as_json: bool) -> None:
    """Train a small network on handwritten digits with 2 workers, kill one, stop, resume on 1 worker, report."""
    home = run_dir or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-demo"
    started = time.monotonic()
    say(f"1. Two workers train on handwritten digits. Run directory: {home}", as_json)
    stopped_at = _run_until_half_way(home, as_json)
    say(
        f"3. At step {stopped_at} SIGTERM stops the run; it commits a checkpoint and ends with 75.",
        as_json,
    )
    say("4. One worker goes on from there; the result is the same as with any other number.", as_json)
    code = subprocess.run(_command(home, workers=1, as_json=as_json), stdout=_quiet(as_json)).returncode
    if code != 0:
        raise EnvironmentProblem(f"The resumed run ended with {code}.", fix=[f"mh logs {home}"])
    report = _report(home, time.monotonic() - started)
    click.echo(exact_json.encode(report) if as_json else _told(report))


def say(line: str, as_json: bool) -> None:
    if not as_json:
        click.secho(line, bold=True, err=True)


def _command(home: Path, *, workers: int, as_json: bool) -> list[str]:
    quiet = ["--ui", "none"] if as_json else []
    script = ["-m", "manyhands.recipes.digits", "--epochs", str(EPOCHS)]
    return [
        sys.executable,
        "-m",
        "manyhands.cli.main",
        "run",
        "-n",
        str(workers),
        *(["--elastic", "1:2"] if workers > 1 else []),
        "--run-dir",
        str(home),
        *quiet,
        *script,
    ]


def _quiet(as_json: bool) -> int | None:
    return subprocess.DEVNULL if as_json else None


def _run_until_half_way(home: Path, as_json: bool) -> int:
    """Start the run with two workers, kill one, stop the run after half of its steps; the step it stopped at."""
    process = subprocess.Popen(_command(home, workers=2, as_json=as_json), stdout=_quiet(as_json))
    try:
        _wait_for_share(process, home, KILL_AT)
        victim = _kill_a_worker(home)
        say(f"2. kill -9 {victim}: one of the two is gone. The other goes on, and another takes its place.", as_json)
        _wait_for_share(process, home, STOP_AT)
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)
    finally:
        process.kill()
    if code != 75:
        raise EnvironmentProblem(f"The first half ended with {code}, not with 75.", fix=[f"mh logs {home}"])
    return max(event.step for event in read_run_events(home) if isinstance(event, CheckpointSaved))


def _wait_for_share(process: subprocess.Popen[bytes], home: Path, share: float) -> None:
    """Until this share of the run's steps is committed."""
    deadline = time.monotonic() + DEADLINE_S
    while process.poll() is None and time.monotonic() < deadline:
        done = [event for event in read_run_events(home) if isinstance(event, StepDone)]
        if done and done[-1].total_steps and done[-1].step >= share * done[-1].total_steps:
            return
        time.sleep(0.1)
    raise EnvironmentProblem(
        f"The run did not get as far as {share:.0%} of its steps; it ended with {process.poll()}.",
        fix=[f"mh logs {home}"],
    )


def _kill_a_worker(home: Path) -> int:
    """SIGKILL to the run's last worker; its pid."""
    try:
        victim = max(query(home).members, key=lambda member: member.rank)
        os.kill(victim.pid, signal.SIGKILL)
    except (UsageError, ProcessLookupError) as error:
        raise EnvironmentProblem(f"There was no worker to kill: {error}", fix=[f"mh logs {home}"]) from error
    return victim.pid


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
    """The loss of the worker that was killed, and the first step that was committed without it."""
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


def _told(report: dict[str, Any]) -> str:
    first, second, killed = report["workers"][0], report["workers"][-1], report["killed"]
    joined = "another joined" if killed["replaced"] else "another was starting when the run was stopped"
    sound = "; ".join(report["problems"]) or (
        f"{report['steps_done_twice']} steps done twice, {report['samples_lost']} samples lost, "
        f"{report['samples_repeated']} repeated"
    )
    return "\n".join(
        [
            "",
            f"What happened: {report['steps']} steps in {report['slices']} slices each, the first "
            f"{report['stopped_and_resumed_at']} by {first} workers, but for the one killed, the rest by {second}; "
            f"{sound}.",
            f"Killed: rank {killed['rank']} (pid {killed['pid']}). {killed['went_on_after_s']:.2f} s after that "
            f"was seen, step {killed['next_step']} was committed without it; {joined}.",
            f"Held-out digits: {report['accuracy']:.2%} of {report['examples_evaluated']} right, each counted once.",
            f"It took {report['seconds']} s. Everything is in {report['run_dir']}:",
            f"  mh status {report['run_dir']}",
            f"  mh ckpt ls {report['run_dir']}",
            f"  mh logs {report['run_dir']}",
        ]
    )
