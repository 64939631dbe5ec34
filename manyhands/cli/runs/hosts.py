"""`mh hosts`: who lends hosts to a run; asks the placer for more of them, or gives one back."""

from __future__ import annotations

import json

import click

from manyhands.cli.runs.status import host_line
from manyhands.errors import UsageError
from manyhands.launcher.placers import slurm_jobs
from manyhands.launcher.placers.slurm_jobs import SlurmJob
from manyhands.launcher.placers.submission import jobs_dir
from manyhands.observe.run_status import find_run, look_at
from manyhands.spec.load import environment

__all__ = ["hosts"]

MOST = 1000


@click.command()
@click.argument("run")
@click.argument("action", type=click.Choice(["add", "drop"]), required=False)
@click.argument("what", required=False)
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
def hosts(run: str, action: str | None, what: str | None, as_json: bool) -> None:
    """Show who lends hosts to RUN, and for how long: a run directory, or its name under runs/.

    For a run that `mh run --on slurm -N 2:8` submitted: `mh hosts RUN add 2` submits helper jobs for two more hosts,
    `mh hosts RUN drop n3` cancels the one on n3, whose workers leave at the end of a step.
    """
    if action is None:
        _show(run, as_json)
        return
    if what is None:
        raise UsageError(
            f"mh hosts RUN {action} needs one more word.", fix=["mh hosts RUN add 2", "mh hosts RUN drop n3"]
        )
    job = slurm_jobs.find_job(_directory(run), jobs_dir(environment()))
    changed = _add(job, what) if action == "add" else slurm_jobs.drop_host(job, what)
    if as_json:
        click.echo(json.dumps({"run_dir": job.run.run_dir, "job": job.number, action: what, "helper": changed}))
    elif action == "add":
        click.echo(f"submitted helper jobs {changed} for {what} more host{'s'[: what != '1']}")
    else:
        click.echo(f"helper job {changed} on {what} is cancelled; its workers leave at the end of a step")


def _add(job: SlurmJob, what: str) -> str:
    if not what.isdigit() or not 1 <= int(what[:6]) <= MOST:
        raise UsageError(f"{what} is no number of hosts.", where="mh hosts RUN add", fix=["mh hosts RUN add 2"])
    return slurm_jobs.add_hosts(job, int(what))


def _directory(run: str) -> str:
    """A run that still waits in the queue has no directory yet."""
    try:
        return str(find_run(run))
    except UsageError:
        return run


def _show(run: str, as_json: bool) -> None:
    path = _directory(run)
    try:
        job = slurm_jobs.find_job(path, jobs_dir(environment()))
    except UsageError:
        job = None
    lent = look_at(find_run(run)).lent if job is None or _has_begun(path) else []
    helpers = slurm_jobs.helper_jobs(job.number) if job is not None else []
    state = slurm_jobs.look(job.number) if job is not None else None
    if as_json:
        facts = {
            "hosts": [host_line(host) for host in lent],
            "job": job.number if job is not None else None,
            "state": state.text if state is not None else None,
            "helpers": [{"job": one.number, "state": one.state, "host": one.host} for one in helpers],
        }
        click.echo(json.dumps(facts))
        return
    lines = [host_line(host) for host in lent]
    if job is not None:
        lines.append(f"slurm {job.number}: {state.text if state is not None else 'ended'}")
    lines += [f"slurm {one.number}, helper: {one.state}{f' on {one.host}' if one.host else ''}" for one in helpers]
    click.echo("\n".join(lines) or "No host is lent to this run now.")


def _has_begun(path: str) -> bool:
    try:
        find_run(path)
    except UsageError:
        return False
    return True
