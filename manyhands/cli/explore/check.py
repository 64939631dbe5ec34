"""`mh check`: compares a script's result under every layout with that of one process."""

from __future__ import annotations

import functools
import sys
from typing import Any

import click

from manyhands import exact_json
from manyhands.cli.common.setting_options import BOTH_SPELLINGS, settings_options, take_settings
from manyhands.errors import UsageError
from manyhands.launcher.launch import script_command
from manyhands.trials.layout_check import Asked, LayoutReport
from manyhands.trials.layout_check import check as compare_layouts
from manyhands.trials.trial_runner import ended_by_signals

__all__ = ["check"]

TAKEN = ("seed", "precision", "clip_norm", "threads", "timeout_s", "plane")


@click.command(context_settings={**BOTH_SPELLINGS, "allow_interspersed_args": False, "max_content_width": 110})
@click.option("-n", "--workers", "most", type=int, default=4, metavar="MAX", help="Maximum of workers. Default: 4.")
@click.option("--steps", type=int, default=5, help="How many steps each layout takes. Default: 5.")
@click.option("--slices", type=int, default=4, help="V, slices per batch, the same for all. Default: 4.")
@click.option("--only", multiple=True, metavar="NAME", help="Only this layout, such as 'pipeline 2'; may be repeated.")
@click.option("--wait", "wait_s", type=float, default=180.0, help="Seconds that a layout may take. Default: 180.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON document.")
@click.option("--config", "config_file", metavar="FILE", help="A TOML file of settings; see `mh config show`.")
@functools.partial(settings_options, names=TAKEN)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def check(
    script: str,
    arguments: tuple[str, ...],
    most: int,
    steps: int,
    slices: int,
    only: tuple[str, ...],
    wait_s: float,
    as_json: bool,
    config_file: str | None,
    module: bool,
    **options: Any,
) -> None:
    """Run SCRIPT for a few steps under every layout that fits, and compare each with one process.

    Prints the largest deviation of losses, gradients, gradient norm (if the script clips) and weights: of weights
    relative to the largest value of each tensor, of gradients to the largest of the model. Deviations that rounding
    alone explains (as large as in a single process that starts with the last bits of its weights changed) are listed
    and do not count. Exit code 1 if a layout deviates by more; the tensors are named. A layout that does not fit the
    model is listed with the reason. All run with one thread per worker, unless --threads is given. Nothing is saved,
    and scripts end inside `fit`.
    """
    for name, value in (("-n", most), ("--steps", steps), ("--slices", slices)):
        if value < 1:
            raise UsageError(f"{name} is {value}, but must be at least 1.", where=name, fix=[f"{name} 1"])
    asked = Asked(
        command=script_command(script, arguments, is_module=module),
        flags=take_settings(options),
        config_file=config_file,
        steps=steps,
        slices=slices,
        most_workers=most,
        only=only,
        timeout_s=wait_s,
    )
    with ended_by_signals():
        report = compare_layouts(asked, functools.partial(click.echo, err=as_json))
    click.echo(exact_json.encode(report, indent=2) if as_json else _verdict(report))
    sys.exit(1 if report.deviates else 0)


def _verdict(report: LayoutReport) -> str:
    ran = [one for one in report.findings if not one.failed]
    same, explained = sum(one.agrees for one in ran), any(one.explained for one in ran)
    but = ", except where rounding alone explains it" if explained else ""
    return (
        f"{same} of {len(ran)} layouts agree with one process to {report.tolerance:g}{but}, after {report.steps} "
        f"steps, V={report.slices}"
    )
