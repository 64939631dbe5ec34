"""`mh agent`: joins this host to a run that another host started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import click

from manyhands.cli.common.json_display import display_for
from manyhands.cli.common.setting_options import BOTH_SPELLINGS, LIFELINE_HELP
from manyhands.control.messages.launch_request import JoinTicket, LaunchRequest
from manyhands.control.security.keys import read_join_file, read_join_input
from manyhands.errors import ClusterError, UsageError
from manyhands.launcher.launch import forks_workers, host_seat, launch_command, placer_times, worker_environment
from manyhands.launcher.machine import read_key, this_machine
from manyhands.spec.addresses import parse_task_address
from manyhands.spec.load import KEY_FILE_VARIABLE, environment, resolve
from manyhands.spec.placement import Placement

__all__ = ["agent"]


@click.command(context_settings=BOTH_SPELLINGS)
@click.option(
    "--join",
    "join",
    metavar="FILE|-|ADDR:PORT",
    required=True,
    help="The join file that `mh run` wrote; -: its content on standard input; ADDR:PORT: where the run listens, with "
    "the key in MANYHANDS_KEY_FILE.",
)
@click.option("-n", "--workers", type=int, help="Workers on this host. Default: one per accelerator, else one.")
@click.option("--threads", type=int, help="Threads per worker. Default: cores / workers.")
@click.option("--listen", metavar="ADDR", help="Address for tensors to this host. Default: by the route.")
@click.option("--dir", "folder", metavar="DIR", help="Directory that the workers run in. Default: this one.")
@click.option("--lifeline", is_flag=True, help=LIFELINE_HELP)
@click.option("--ui", type=click.Choice(["auto", "live", "plain", "none"]), help="How to show progress.")
@click.option("--json", "as_json", is_flag=True, help="Events, output and failures as JSON lines on stdout.")
def agent(join: str, folder: str | None, lifeline: bool, as_json: bool, **options: Any) -> int:
    """Add this host to a run: start workers of the run here, and end when it ends.

    The run provides the command and its environment; the script and its data have to be on this host under the same
    path.
    """
    environ = environment()
    ticket = _ticket(join, environ)
    resolved = resolve(flags=options, environ=environ)
    launch = resolved.spec.launch
    if folder is not None:
        _work_in(folder)
    request = LaunchRequest(
        command=None,
        join=ticket,
        workers=launch.workers or this_machine(environ).default_workers,
        threads=launch.threads,
        forks=forks_workers(resolved, environ),
        listen=launch.listen,
        lifeline=lifeline,
        seat=host_seat(environ),
        times=placer_times(environ),
        # Unencrypted Gloo between hosts was accepted when the run was started; joining accepts it as well.
        insecure_data_plane=True,
        environment=worker_environment(resolved, environ),
    )
    placement = Placement(workers=request.workers, host_rank=None, coordinates=False)
    return launch_command(request, placement, display_for(resolved, environ, as_json=as_json))


def _ticket(join: str, environ: Mapping[str, str]) -> JoinTicket:
    if join == "-":
        return read_join_input()
    if os.path.exists(join) or os.sep in join or ":" not in join:
        return read_join_file(join)
    host, port = parse_task_address(join, "--join", "--join")
    if not (path := environ.get(KEY_FILE_VARIABLE)):
        raise ClusterError(
            f"To join at {join} this host needs the run's key.",
            where=f"{KEY_FILE_VARIABLE} is not set",
            fix=[f"{KEY_FILE_VARIABLE}=FILE", "mh agent --join FILE, with the join file that `mh run` wrote"],
        )
    return JoinTicket(address=f"[{host}]:{port}" if ":" in host else join, run="", key=read_key(path).hex())


def _work_in(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        raise UsageError(f"Cannot work in {folder}: {error.strerror}.", where="--dir") from error
