"""`mh scale`: changes the number of workers or parameter servers of a live elastic run."""

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
@click.option("--servers", type=int, help="Requested number of parameter servers.")
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
def scale(run: str, workers: int | None, servers: int | None, as_json: bool) -> None:
    """Ask RUN, an elastic run, to continue with WORKERS workers: a run directory, or its name under runs/.

    Returns at once; `mh status RUN` shows which workers start, join and leave. No worker is stopped in the middle of a
    step, and a server leaves when the others have taken over its shards.
    """
    if workers is None and servers is None:
        raise UsageError("Neither WORKERS nor --servers was given.", fix=["mh scale RUN 4", "mh scale RUN --servers 3"])
    path = find_run(run)
    answer = request_scale(path, workers, servers)
    assert answer.elastic is not None
    if as_json:
        facts = {
            "run": answer.run,
            "run_dir": os.path.abspath(path),
            "workers_wanted": answer.workers_wanted,
            "elastic": answer.elastic,
        }
        if answer.servers:
            facts["servers_wanted"] = answer.servers_wanted
        click.echo(json.dumps(facts))
        return
    requested = [_many(workers, "worker")] * bool(workers) + [_many(servers, "server")] * bool(servers)
    current = [str(sum(member.rank >= 0 for member in answer.members))] * bool(workers)
    current += [str(len(answer.servers))] * bool(servers)
    click.echo(f"{path}: requested {' and '.join(requested)}; on this host it has {' and '.join(current)}.")


def _many(number: int | None, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
