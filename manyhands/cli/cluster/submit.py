"""`mh submit`: put a script into the queue."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import click

from manyhands.cli.cluster.queue_option import queue_option
from manyhands.cli.common.setting_options import BOTH_SPELLINGS, settings_options, take_settings
from manyhands.errors import UsageError
from manyhands.launcher.launch import script_command
from manyhands.launcher.machine import num_cores
from manyhands.scheduler.queue_folder import JobSubmission, QueueFolder, script_digest
from manyhands.spec.load import environment, flag_name, resolve
from manyhands.spec.undecodable_names import check_name
from manyhands.spec.worker_identity import IDENTITY_VARIABLES

__all__ = ["submit"]

SETTINGS = (
    *("strategy", "precision", "slices", "accumulate", "exact", "seed", "clip_norm", "reducer", "balance"),
    *("max_restarts", "grace_s", "every_steps", "every_s", "keep_last", "keep_best", "memory_format"),
)
"""Settings of a run that a job may have; the others are the daemon's."""


@click.command(context_settings={**BOTH_SPELLINGS, "allow_interspersed_args": False})
@click.option("--least", type=click.IntRange(1), default=1, show_default=True, help="Fewest workers it runs with.")
@click.option("--most", type=click.IntRange(1), help="Most workers. Default: all of the cluster. As --least: fixed.")
@click.option("--priority", type=float, default=1.0, show_default=True, help="How much its workers count.")
@click.option("--after", metavar="JOB", multiple=True, help="Start when this job has finished; may be repeated.")
@functools.partial(settings_options, names=SETTINGS)
@queue_option
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def submit(
    script: str,
    arguments: tuple[str, ...],
    least: int,
    most: int | None,
    priority: float,
    after: tuple[str, ...],
    directory: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Put SCRIPT into the queue of `mh cluster up`; arguments after it are passed to the script.

    It is run in this directory, with this environment. No daemon has to run: the job is in the queue when this command
    returns. A script that is changed before its job starts, or resumes, is not run. Scripts that cannot change their
    number of workers need --most as --least.
    """
    settings, environ = take_settings(options), environment()
    spec = resolve(flags=settings, environ=environ).spec
    command = script_command(script, arguments)
    folder = QueueFolder(directory)
    folder.make()
    hosts = folder.log.load().hosts
    _check(least, most, priority, after, folder, sum(hosts))
    submission = JobSubmission(
        script=os.path.abspath(command.target),
        arguments=list(arguments),
        settings=_flags(settings),
        least=least,
        most=most if most is not None else max(least, sum(hosts) or num_cores()),
        priority=priority,
        after=list(after),
        grace_s=spec.run.grace_s,
        digest=script_digest(command.target),
        folder=os.getcwd(),
        python=sys.executable,
        # What identifies a worker would make the job a part of the run that it was submitted from.
        environment={name: text for name, text in environ.items() if name not in IDENTITY_VARIABLES},
        submitted_s=time.time(),
    )
    check_name(submission.folder, "The working directory")
    _show(folder, folder.submit(submission), submission, as_json)


def _check(
    least: int, most: int | None, priority: float, after: tuple[str, ...], folder: QueueFolder, total: int
) -> None:
    if most is not None and most < least:
        raise UsageError(f"--most {most} is below --least {least}.", fix=[f"--least {least} --most {least}"])
    if total and least > total:
        raise UsageError(
            f"The job needs {least} workers or more, and the cluster has {total}.",
            where="--least",
            fix=[f"--least {total}", f"mh cluster up --workers {least}"],
        )
    if not priority > 0:
        raise UsageError(f"--priority is {priority:g}, but must be above 0.", fix=["--priority 1"])
    for job in after:
        folder.submission(job)  # It exists: a job waits for earlier ones only, so none can wait for itself.


def _flags(settings: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in settings.items():
        flag = flag_name(name)
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [flag, str(value)]
    return words


def _show(folder: QueueFolder, job: str, submission: JobSubmission, as_json: bool) -> None:
    daemon = folder.has_daemon()
    if as_json:
        facts = {"job": job, "run_dir": str(folder.run_dir(job)), "least": submission.least, "most": submission.most}
        click.echo(json.dumps({**facts, "daemon": daemon}))
        return
    later = "" if daemon else "; it starts when mh cluster up runs"
    click.echo(f"job {job}: {submission.least} to {submission.most} workers{later}")
