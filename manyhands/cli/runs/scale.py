"""`mh scale`: more or fewer workers, or parameter servers, for a live elastic run."""

from __future__ import annotations

import json
import os

import click

from manyhands.control.session.run_client import request_scale
from manyhands.errors import UsageError
from manyhands.observe.run_status import find_run

__all__ = ["scale"]


@click.command()
@click.argument("run")
@click.argument("workers", type=int, required=False)
@click.option("--servers", type=int, help="How many parameter servers there should be.")
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
def scale(run: str, workers: int | None, servers: int | None, as_json: bool) -> None:
    """Ask RUN, an elastic run, to go on with WORKERS workers: a run directory, or its name under runs/.

    Returns at once; `mh status RUN` shows who starts, joins and leaves. Nobody is stopped in the middle of a step, and
    a server leaves when the others have taken over what it held.
    """
    if workers is None and servers is None:
        raise UsageError(
            "Neither workers nor servers were counted.", fix=["mh scale RUN 4", "mh scale RUN --servers 3"]
        )
    path = find_run(run)
    stood = request_scale(path, workers, servers)
    assert stood.elastic is not None
    if as_json:
        facts = {
            "run": stood.run,
            "run_dir": os.path.abspath(path),
            "workers_wanted": stood.workers_wanted,
            "elastic": stood.elastic,
        }
        if stood.servers:
            facts["servers_wanted"] = stood.servers_wanted
        click.echo(json.dumps(facts))
        return
    asked = [_many(workers, "worker")] * bool(workers) + [_many(servers, "server")] * bool(servers)
    here = [str(sum(member.rank >= 0 for member in stood.members))] * bool(workers)
    here += [str(len(stood.servers))] * bool(servers)
    click.echo(f"{path} was asked to go on with {' and '.join(asked)}; here it has {' and '.join(here)}.")


def _many(number: int | None, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
