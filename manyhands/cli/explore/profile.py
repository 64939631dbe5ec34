"""`mh profile`: finds out what holds a run back, data, the exchange between workers or computation."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import click

from manyhands import exact_json
from manyhands.cli.common.setting_options import BOTH_SPELLINGS, settings_options, take_settings
from manyhands.errors import EnvironmentProblem, UsageError
from manyhands.launcher.launch import script_command
from manyhands.observe.run_status import find_run

__all__ = ["profile"]

# As in `mh tune`; the run directory is the trial's.
TAKEN = (
    *("workers", "servers", "seed", "strategy", "precision", "slices", "accumulate", "exact", "clip_norm"),
    *("threads", "allocator", "memory_format", "plane", "reducer", "bucket_bytes"),
)
EXAMPLES = """
\b
Examples:
  mh profile train.py --lr 0.1              trials of train.py, and a verdict
  mh profile -n 4 --trace run.json train.py  with 4 workers, and a trace for ui.perfetto.dev
  mh profile runs/20260101-120000-train     what the record of a run says already
"""


@click.command(
    context_settings={**BOTH_SPELLINGS, "allow_interspersed_args": False, "max_content_width": 110}, epilog=EXAMPLES
)
@click.option("--steps", type=int, default=20, help="Steps that a trial measures, or more if they are short.")
@click.option("--rounds", type=int, default=3, help="How often all trials are repeated. Default: 3.")
@click.option("--wait", "wait_s", type=float, default=120.0, help="Seconds that a trial may take to its first step.")
@click.option("--trace", "trace_path", metavar="FILE", help="Write a few steps of all workers for Perfetto: a .json.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON document.")
@click.option("--config", "config_file", metavar="FILE", help="A TOML file of settings; see `mh config show`.")
@functools.partial(settings_options, names=TAKEN)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.argument("target", metavar="SCRIPT|RUN")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def profile(
    target: str,
    arguments: tuple[str, ...],
    steps: int,
    rounds: int,
    wait_s: float,
    trace_path: str | None,
    as_json: bool,
    config_file: str | None,
    module: bool,
    **options: Any,
) -> None:
    """Find out what holds SCRIPT back: data, the exchange between workers, or computation.

    Runs SCRIPT for a few steps as it is, with data fetched before the first step, without the exchange between workers,
    with other threads, and with one more loader process; in rounds, so that the noise is known. Prints what a step
    takes less in each way, what to change, seconds by phase and worker, and the layers that take longest. Trials leave
    no checkpoint and end inside `fit`; files that the script writes before `fit` are written.

    Of RUN, a run directory or its name under runs/, live or ended, prints what its record says, without trials.
    """
    settings = take_settings(options)
    if not module and _is_run(target):
        _show_run(target, settings, trace_path, as_json)
        return
    for name, value in (("--steps", steps), ("--rounds", rounds)):
        if value < 1:
            raise UsageError(f"{name} is {value}, but must be at least 1.", where=name, fix=[f"{name} 3"])
    if not 0 < wait_s < 86400:
        raise UsageError(f"--wait is {wait_s:g}, but must be above 0.", where="--wait", fix=["--wait 120"])
    command = script_command(target, arguments, is_module=module)
    if trace_path is not None:
        _check_target(trace_path)
    # Loaded only now: it takes torch, and a second.
    from manyhands.trials.bottleneck_search import Profiling
    from manyhands.trials.bottleneck_search import profile as find_bottleneck
    from manyhands.trials.trial_runner import ended_by_signals

    asked = Profiling(
        command=command, flags=settings, config_file=config_file, steps=steps, rounds=rounds, wait_s=wait_s
    )
    with ended_by_signals():
        report, trace = find_bottleneck(asked, functools.partial(click.echo, err=True))
    if trace_path is not None:
        Path(trace_path).write_bytes(exact_json.encode(trace))
    click.echo(exact_json.encode(report, indent=2) if as_json else report.text())
    if trace_path is not None and not as_json:
        click.echo(f"trace of {report.facts.workers} workers in {trace_path}: open it in ui.perfetto.dev")


def _is_run(target: str) -> bool:
    """Scripts are files; a run is a directory, or the name of one under runs/."""
    return os.path.isdir(target) or os.path.isdir(os.path.join("runs", target))


def _show_run(target: str, settings: dict[str, Any], trace_path: str | None, as_json: bool) -> None:
    from manyhands.profiling.recorded_run import read_run_times

    if settings or trace_path is not None:
        flag = "--trace" if trace_path is not None else f"--{next(iter(settings)).replace('_', '-')}"
        raise UsageError(
            f"{flag} is for trials of a script, but {target} is a run that was recorded.",
            where=flag,
            fix=[f"mh profile {target}", f"mh profile {flag} ... train.py"],
        )
    report = read_run_times(find_run(target))
    click.echo(exact_json.encode(report, indent=2) if as_json else report.text())


def _check_target(path: str) -> None:
    """Before any trial: an error at the end would waste a minute."""
    folder = os.path.dirname(os.path.realpath(path))
    if not os.access(folder, os.W_OK):
        raise EnvironmentProblem(f"{folder} is not a writable directory.", where="--trace", fix=["--trace run.json"])
    if os.path.isdir(path):
        raise UsageError(f"{path} is a directory.", where="--trace", fix=[f"--trace {os.path.join(path, 'run.json')}"])
