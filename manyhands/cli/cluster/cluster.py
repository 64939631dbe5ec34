"""`mh cluster`: serve a queue of jobs on this machine, or simulate one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from manyhands.cli.cluster.queue_option import queue_option
from manyhands.errors import UsageError
from manyhands.launcher.machine import this_machine
from manyhands.observe.event_text import clean, duration
from manyhands.scheduler.daemon import QueueDaemon
from manyhands.scheduler.queue_folder import QueueFolder
from manyhands.scheduler.queue_state import QueuedJob
from manyhands.scheduler.simulate import SimulatedCluster, simulate
from manyhands.scheduler.trace import read_trace
from manyhands.spec.load import environment

__all__ = ["cluster"]

POLICIES = click.Choice(["jct", "fair", "priority"])
POLICY_HELP = "jct: the shortest mean completion time. fair: the same for every job. priority: by mh submit --priority."


@click.group()
def cluster() -> None:
    """Serve a queue of jobs on this machine, or simulate one."""


@cluster.command()
@click.option("--workers", type=click.IntRange(1), help="Workers that all jobs have together. Default: the cores.")
@click.option("--policy", type=POLICIES, default="jct", show_default=True, help=POLICY_HELP)
@click.option("--until-empty", is_flag=True, help="End when all jobs have ended, instead of waiting for more.")
@queue_option
@click.option("--json", "as_json", is_flag=True, help="One JSON line for every change of a job.")
def up(workers: int | None, policy: Any, until_empty: bool, directory: Path, as_json: bool) -> None:
    """Run the jobs of the queue on this machine's cores until Ctrl-C, each as an elastic run.

    Jobs that run then keep running; the next `mh cluster up` takes them over. The same holds if this process is killed.
    """
    machine = this_machine(environment())
    workers = workers or machine.cores
    folder = QueueFolder(directory)
    if not as_json:
        click.echo(f"{workers} worker{'s'[: workers != 1]} for the jobs in {folder.path}; mh submit adds jobs")
        if machine.accelerators:
            click.echo("this machine's accelerators are not shared out: jobs train on its cores")
    daemon = QueueDaemon(
        folder, workers, max(1, machine.cores // workers), policy, lambda job, before: _say(job, before, as_json)
    )
    left = daemon.serve(until_empty=until_empty)
    if left and not as_json:
        click.echo(f"{len(left)} job{'s'[: len(left) != 1]} keep running; mh cluster up takes over again")


def _say(job: QueuedJob, before: QueuedJob | None, as_json: bool) -> None:
    if before is not None and (job.phase, job.placed, job.why) == (before.phase, before.placed, before.why):
        return
    if as_json:
        facts = {"job": job.job, "name": job.name, "state": job.phase, "workers": job.workers, "why": job.why}
        click.echo(json.dumps({**facts, "exit_code": job.exit_code, "time_s": time.time()}))
    elif before is None or job.why != before.why or job.phase in ("done", "failed", "cancelled"):
        click.echo(f"{time.strftime('%H:%M:%S')} job {job.job} ({clean(job.name)}): {clean(job.why or 'submitted')}")


@cluster.command(name="simulate")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--hosts", default=1, show_default=True, type=click.IntRange(1), help="Hosts of the simulated cluster.")
@click.option(
    "--workers", default=4, show_default=True, type=click.IntRange(1), help="Workers that each host can have."
)
@click.option("--policy", type=POLICIES, default="jct", show_default=True, help=POLICY_HELP)
@click.option("--start", "start_s", default=30.0, show_default=True, help="Seconds from a start to the first step.")
@click.option(
    "--rescale", "rescale_s", default=2.0, show_default=True, help="Seconds that a change of size pauses a job."
)
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
def simulate_command(
    trace: Path, hosts: int, workers: int, policy: Any, start_s: float, rescale_s: float, as_json: bool
) -> None:
    """Play the jobs of TRACE on a simulated cluster, with the policy that `mh cluster up` uses.

    TRACE has one JSON object per line: name, arrives_s, steps, step_s (seconds of a step by number of workers), and
    optionally least, most, priority, after.
    """
    if start_s < 0 or rescale_s < 0:
        raise UsageError("--start and --rescale are seconds, and cannot be below 0.")
    played = simulate(read_trace(trace), (workers,) * hosts, policy, start_s=start_s, rescale_s=rescale_s)
    click.echo(json.dumps(_facts(played), indent=2) if as_json else "\n".join(_lines(played)))


def _facts(played: SimulatedCluster) -> dict[str, Any]:
    jobs = [{name: getattr(job, name) for name in job.__struct_fields__} for job in played.jobs]
    return {
        "mean_completion_s": played.mean_completion_s,
        "largest_fair_ratio": played.largest_fair_ratio,
        "makespan_s": played.makespan_s,
        "utilization": played.utilization,
        "jobs": jobs,
    }


def _lines(played: SimulatedCluster) -> list[str]:
    lines = [f"{'job':<20} {'arrives':>8} {'waits':>8} {'completes':>9} {'rescales':>8}"]
    for job in played.jobs:
        waited, took = (duration(one) if one is not None else "never" for one in (job.waited_s, job.completion_s))
        lines.append(f"{clean(job.name):<20} {duration(job.arrives_s):>8} {waited:>8} {took:>9} {job.rescales:>8}")
    mean, span = duration(played.mean_completion_s), duration(played.makespan_s)
    lines.append(
        f"mean completion {mean}, all in {span}, {played.utilization:.0%} of the workers used; "
        f"at most {played.largest_fair_ratio:.2f} times the time of an equal share"
    )
    return lines
