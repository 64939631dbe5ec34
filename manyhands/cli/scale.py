"""`mh scale`: more or fewer workers for a live elastic run."""

from __future__ import annotations

import json
import os

import click

from manyhands.control.client import request_scale
from manyhands.runtime.overview import find_run

__all__ = ["scale"]


@click.command()
@click.argument("run")
@click.argument("workers", type=int)
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
def scale(run: str, workers: int, as_json: bool) -> None:
    """Ask RUN, an elastic run, to go on with WORKERS workers: a run directory, or its name under runs/.

    Returns at once; `mh status RUN` shows who starts, joins and leaves. Nobody is stopped in the middle of a step.
    """
    path = find_run(run)
    stood = request_scale(path, workers)
    assert stood.elastic is not None
    before = sum(member.rank >= 0 for member in stood.members)
    if as_json:
        facts = {
            "run": stood.run,
            "run_dir": os.path.abspath(path),
            "workers_wanted": workers,
            "elastic": stood.elastic,
        }
        click.echo(json.dumps(facts))
    else:
        click.echo(
            f"{path} was asked to go on with {workers} {'worker' if workers == 1 else 'workers'}; here it has {before}."
        )
