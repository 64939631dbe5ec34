"""`mh stop`: ask a live run to end."""

from __future__ import annotations

import json
import os

import click

from manyhands.control.session.run_client import request_stop
from manyhands.observe.run_status import find_run

__all__ = ["stop"]


@click.command()
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
def stop(run: str, as_json: bool) -> None:
    """Ask RUN to commit a checkpoint and end: a run directory, or its name under runs/.

    Returns at once; `mh status RUN` shows when it has ended. The command that started the run also resumes it.
    """
    path = find_run(run)
    answer = request_stop(path)
    steps = [member.step for member in answer.members if member.step is not None]
    if as_json:
        facts = {"run": answer.run, "run_dir": os.path.abspath(path), "step": max(steps, default=None)}
        click.echo(json.dumps(facts))
    else:
        where = f" at step {max(steps)}" if steps else ""
        click.echo(f"{path} was asked to stop{where}.")
