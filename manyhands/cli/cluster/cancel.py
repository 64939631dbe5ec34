"""`mh cancel`: take a job out of the queue."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import click

from manyhands.cli.cluster.queue_option import queue_option
from manyhands.control.session.run_client import request_stop
from manyhands.errors import ManyhandsError, UsageError
from manyhands.scheduler.queue_folder import QueueFolder
from manyhands.scheduler.queue_state import ENDED

__all__ = ["cancel"]


@click.command()
@click.argument("job")
@queue_option
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
def cancel(job: str, directory: Path, as_json: bool) -> None:
    """Take JOB out of the queue; a running one commits a checkpoint and ends. Jobs after it are cancelled, too."""
    folder = QueueFolder(directory)
    folder.submission(job)
    known = folder.log.load().jobs.get(job)
    if known is not None and known.phase in ENDED:
        raise UsageError(f"Job {job} has ended: {known.why}.", fix=["mh queue"])
    folder.cancel(job)
    if not folder.has_daemon():
        with contextlib.suppress(ManyhandsError):  # it does not run
            request_stop(folder.run_dir(job))
    click.echo(json.dumps({"job": job, "cancelled": True}) if as_json else f"job {job} was cancelled.")
