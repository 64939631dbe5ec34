"""`mh demo`: train on handwritten digits with 2 workers, stop half-way, go on with 1, and say what happened."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from manyhands.errors import EnvironmentProblem
from manyhands.events import CheckpointSaved, Evaluated, Event, Resumed, RunStarted, StepDone
from manyhands.runtime.recorder import read_events

__all__ = ["demo"]

EPOCHS = 15
DEADLINE_S = 300.0


@click.command()
@click.option("--run-dir", type=click.Path(path_type=Path), help="Where the run goes. Default: runs/<time>-demo.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def demo(run_dir: Path | None, as_json: bool) -> None:
    """Train a small network on handwritten digits with 2 workers, stop half-way, resume on 1 worker, report."""
    home = run_dir or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-demo"
    started = time.monotonic()
    say(f"1. Two workers train on handwritten digits. Run directory: {home}", as_json)
    stopped_at = _run_until_half_way(home, as_json)
    say(
        f"2. Half-way, at step {stopped_at}, SIGTERM stops the run; it commits a checkpoint and ends with 75.",
        as_json,
    )
    say("3. One worker goes on from there; the result is the same as with any other number.", as_json)
    code = subprocess.run(_command(home, workers=1, as_json=as_json), stdout=_quiet(as_json)).returncode
    if code != 0:
        raise EnvironmentProblem(f"The resumed run ended with {code}.", fix=[f"mh logs {home}"])
    report = _report(home, time.monotonic() - started)
    click.echo(json.dumps(report) if as_json else _told(report))


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
        "--run-dir",
        str(home),
        *quiet,
        *script,
    ]


def _quiet(as_json: bool) -> int | None:
    return subprocess.DEVNULL if as_json else None


def _run_until_half_way(home: Path, as_json: bool) -> int:
    """Start the run with two workers and send SIGTERM when half of its steps are done; the step it stopped at."""
    process = subprocess.Popen(_command(home, workers=2, as_json=as_json), stdout=_quiet(as_json))
    try:
        deadline = time.monotonic() + DEADLINE_S
        while process.poll() is None and time.monotonic() < deadline:
            done = [event for event in _events(home) if isinstance(event, StepDone)]
            if done and done[-1].total_steps and done[-1].step >= done[-1].total_steps // 2:
                process.send_signal(signal.SIGTERM)
                break
            time.sleep(0.1)
        code = process.wait(timeout=60)
    finally:
        process.kill()
    if code != 75:
        raise EnvironmentProblem(f"The first half ended with {code}, not with 75.", fix=[f"mh logs {home}"])
    return max(event.step for event in _events(home) if isinstance(event, CheckpointSaved))


def _events(home: Path) -> list[Event]:
    path = home / "events" / "chief.jsonl"
    return list(read_events(path)) if path.exists() else []


def _report(home: Path, seconds: float) -> dict[str, Any]:
    events = _events(home)
    runs = [event for event in events if isinstance(event, RunStarted)]
    resumed = [event for event in events if isinstance(event, Resumed)]
    steps = [event.step for event in events if isinstance(event, StepDone)]
    evaluated = [event for event in events if isinstance(event, Evaluated)]
    return {
        "run_dir": str(home),
        "workers": [run.workers for run in runs],
        "slices": runs[-1].slices,
        "steps": max(steps),
        "steps_done_twice": len(steps) - len(set(steps)),
        "stopped_and_resumed_at": resumed[-1].step,
        "examples_evaluated": evaluated[-1].rows,
        "accuracy": evaluated[-1].results["accuracy"],
        "loss": evaluated[-1].results["loss"],
        "seconds": round(seconds, 1),
    }


def _told(report: dict[str, Any]) -> str:
    first, second = report["workers"][0], report["workers"][-1]
    return "\n".join(
        [
            "",
            f"What happened: {report['steps']} steps in {report['slices']} slices each, the first "
            f"{report['stopped_and_resumed_at']} by {first} workers, the rest by {second}; "
            f"{report['steps_done_twice']} steps done twice.",
            f"Held-out digits: {report['accuracy']:.2%} of {report['examples_evaluated']} right, each counted once.",
            f"It took {report['seconds']} s. Everything is in {report['run_dir']}:",
            f"  mh status {report['run_dir']}",
            f"  mh ckpt ls {report['run_dir']}",
            f"  mh logs {report['run_dir']}",
        ]
    )
