"""`mh tune`: finds the fastest settings for a script on this machine, by measurement."""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Mapping
from typing import Any

import click
import msgspec

from manyhands import exact_json
from manyhands.cli.common.setting_options import BOTH_SPELLINGS, settings_options, take_settings
from manyhands.errors import UsageError
from manyhands.launcher.launch import script_command
from manyhands.observe.event_text import duration
from manyhands.spec.config_file import read_config, write_settings
from manyhands.trials.trial_runner import SECONDS, WAIT_S, Tuned, Tuning
from manyhands.trials.trial_runner import tune as measure
from manyhands.trials.tuning_search import words_of

__all__ = ["tune"]

# Settings of a run that make sense for a trial; run directory and display do not.
TAKEN = (
    *("seed", "strategy", "precision", "slices", "accumulate", "exact", "clip_norm"),
    *("threads", "allocator", "memory_format", "timeout_s", "bucket_bytes"),
)


@click.command(context_settings={**BOTH_SPELLINGS, "allow_interspersed_args": False, "max_content_width": 110})
@click.option("-n", "--workers", "most", type=int, metavar="MAX", help="Maximum of workers to try. Default: the cores.")
@click.option("--seconds", type=float, default=SECONDS, help=f"How long to measure each trial. Default: {SECONDS:g}.")
@click.option(
    "--wait", "wait_s", type=float, default=WAIT_S,
    help=f"Seconds that a trial may take to its first step, and from there to its end. Default: {WAIT_S:g}.",
)  # fmt: skip
@click.option("--allow-maths", is_flag=True, help="Also try what changes results: bf16, another V, another batch.")
@click.option("--write", "target", metavar="FILE", help="Write the choice to this config file; keeps the rest of it.")
@click.option("--json", "as_json", is_flag=True, help="Print trials and choice as one JSON document.")
@click.option("--config", "config_file", metavar="FILE", help="A TOML file of settings; see `mh config show`.")
@functools.partial(settings_options, names=TAKEN)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def tune(
    script: str,
    arguments: tuple[str, ...],
    most: int | None,
    seconds: float,
    wait_s: float,
    allow_maths: bool,
    target: str | None,
    as_json: bool,
    config_file: str | None,
    module: bool,
    **options: Any,
) -> None:
    """Find the fastest settings for SCRIPT on this machine: run it a few seconds with each, print the table, choose.

    Tries splits of the cores into workers and threads, then memory format and allocator, with the script's model and
    data. A setting given as a flag is not varied. Results stay the same, to float rounding, unless --allow-maths.
    Trials leave no checkpoint and end inside `fit`; files that the script writes before `fit` are written.
    """
    _check(most, seconds, wait_s)
    command = script_command(script, arguments, is_module=module)
    if target is not None:
        _check_target(target)
    settings = take_settings(options)
    asked = Tuning(
        command=command,
        flags=settings,
        config_file=config_file,
        most_workers=most,
        seconds=seconds,
        wait_s=wait_s,
        allow_maths=allow_maths,
    )
    tuned = measure(asked, functools.partial(click.echo, err=True))
    if tuned.choice.too_noisy:
        target = None  # nothing to write: the file stays as it is
    if target is not None:
        write_settings(target, tuned.settings)
    config = target or config_file
    flags = {name: value for name, value in settings.items() if name not in tuned.flags}
    words = [] if target is not None else words_of(tuned.flags)
    call = ["-m", script] if module else [script]
    again = shlex.join(
        ["mh", "run", *(["--config", config] if config else []), *words_of(flags), *words, *call, *arguments]
    )
    click.echo(_document(tuned, again, target) if as_json else _text(tuned, again, target))


def _check(most: int | None, seconds: float, wait_s: float) -> None:
    if most is not None and most < 1:
        raise UsageError(f"-n is {most}, but must be at least 1.", where="-n", fix=["-n 2"])
    for flag, value in (("--seconds", seconds), ("--wait", wait_s)):
        if not 0 < value < 86400:
            raise UsageError(
                f"{flag} is {value:g}, but must be above 0 and below a day.", where=flag, fix=[f"{flag} 3"]
            )


def _check_target(path: str) -> None:
    """Checked before any trial: an error at the end would waste a minute."""
    if os.path.exists(path):
        read_config(path)
    folder = os.path.dirname(os.path.realpath(path))
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{folder} is not a writable directory.", where="--write", fix=["--write run.toml"])


def _text(tuned: Tuned, again: str, written: str | None) -> str:
    lines = [tuned.text(), f"measured in {duration(tuned.seconds)}; use it: {again}"]
    return "\n".join([*lines, f"written to {written}"] if written else lines)


def _document(tuned: Tuned, again: str, written: str | None) -> bytes:
    document: Mapping[str, Any] = {**msgspec.to_builtins(tuned), "command": again, "written": written}
    return exact_json.encode(document, indent=2)
