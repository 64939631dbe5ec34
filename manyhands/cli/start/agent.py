"""`mh agent`: joins this host to a run that another host started."""

from __future__ import annotations

import os
from typing import Any

import click

from manyhands.cli.common.json_display import display_for
from manyhands.cli.common.setting_options import BOTH_SPELLINGS
from manyhands.control.messages.launch_request import LaunchRequest
from manyhands.control.security.keys import read_join_file
from manyhands.errors import UsageError
from manyhands.launcher.launch import forks_workers, launch_command, worker_environment
from manyhands.launcher.machine import this_machine
from manyhands.spec.load import environment, resolve
from manyhands.spec.placement import Placement

__all__ = ["agent"]


@click.command(context_settings=BOTH_SPELLINGS)
@click.option("--join", "join_file", metavar="FILE", required=True, help="The join file that `mh run` wrote.")
@click.option("-n", "--workers", type=int, help="Workers on this host. Default: one per accelerator, else one.")
@click.option("--threads", type=int, help="Threads per worker. Default: cores / workers.")
@click.option("--listen", metavar="ADDR", help="Address for tensors to this host. Default: by the route.")
@click.option("--dir", "folder", metavar="DIR", help="Directory that the workers run in. Default: this one.")
@click.option("--ui", type=click.Choice(["auto", "live", "plain", "none"]), help="How to show progress.")
@click.option("--json", "as_json", is_flag=True, help="Events, output and failures as JSON lines on stdout.")
def agent(join_file: str, folder: str | None, as_json: bool, **options: Any) -> int:
    """Add this host to a run: start workers of the run here, and end when it ends.

    The run provides the command; the script and its data have to be on this host under the same path.
    """
    ticket, environ = read_join_file(join_file), environment()
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
        # Unencrypted Gloo between hosts was accepted when the run was started; joining accepts it as well.
        insecure_data_plane=True,
        environment=worker_environment(resolved, environ),
    )
    placement = Placement(workers=request.workers, host_rank=None, coordinates=False)
    return launch_command(request, placement, display_for(resolved, environ, as_json=as_json))


def _work_in(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        raise UsageError(f"Cannot work in {folder}: {error.strerror}.", where="--dir") from error
