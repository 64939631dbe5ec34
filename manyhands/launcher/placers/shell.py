"""Performs a plan: submits, starts or applies it, follows it, and returns the run's exit code.

Start reading at `start_elsewhere`.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from manyhands.control.messages.launch_request import WorkerCommand
from manyhands.errors import EnvironmentProblem, UsageError
from manyhands.launcher.placers import kubernetes, slurm, slurm_jobs, ssh, ssh_hosts
from manyhands.launcher.placers.seats import find_seat, only_task
from manyhands.launcher.placers.shipping import copy_files, tracked_files
from manyhands.launcher.placers.spec import LaunchPlan, PlacedRun
from manyhands.launcher.placers.submission import placed_run
from manyhands.spec.addresses import Address
from manyhands.spec.load import Resolved

__all__ = ["PlacingOptions", "is_elsewhere", "plan_for", "start_elsewhere"]

KUBECTL_TIMEOUT_S = 120.0

Say = Callable[[str], None]


class PlacingOptions(NamedTuple):
    """How the user wants a plan performed."""

    shows: bool = False
    """--print: the plan, and nothing is started."""
    dry_run: bool = False
    detach: bool = False
    as_json: bool = False


def is_elsewhere(resolved: Resolved, environ: Mapping[str, str]) -> bool:
    """Whether a placer starts the agents, and this process is none of them."""
    cluster = resolved.spec.cluster
    if cluster.placer == "slurm" and (slurm.in_step(environ) or not only_task(find_seat(environ))):
        return False  # A placer has placed this agent: a site's file says on = "slurm" to it as well.
    if cluster.placer == "here" and cluster.count.most > 1 and resolved.origins["cluster.on"] == "default":
        raise UsageError(
            f"{cluster.count.most} hosts are asked for, but not who starts agents on them.",
            where=resolved.origins["cluster.hosts"],
            fix=[
                f"--on slurm -N {cluster.hosts}",
                "--hosts a,b for hosts that ssh reaches",
                "--hosts-wanted, and mh agent",
            ],
        )
    return cluster.placer != "here"


def plan_for(resolved: Resolved, run: PlacedRun, environ: Mapping[str, str], asked: PlacingOptions) -> LaunchPlan:
    cluster = resolved.spec.cluster
    key = secrets.token_hex(32)
    if cluster.placer == "kubernetes":
        return kubernetes.plan(cluster, run, key)
    if cluster.placer == "ssh":
        listen = _first_address(resolved, asked)
        return ssh.plan(cluster, run, listen, key, detach=asked.detach)
    if slurm.in_allocation(environ):
        return slurm.plan_in_allocation(cluster, run, environ)
    return slurm.plan(cluster, run)


def _first_address(resolved: Resolved, asked: PlacingOptions) -> Address:
    cluster = resolved.spec.cluster
    try:
        return ssh_hosts.first_address(cluster.named_hosts[0], cluster.extra, resolved.spec.launch.listen)
    except EnvironmentProblem:
        if not (asked.shows or asked.dry_run):
            raise
        return cluster.named_hosts[0].name, ssh_hosts.LOWEST_PORT


def start_elsewhere(
    resolved: Resolved, command: WorkerCommand, environ: Mapping[str, str], asked: PlacingOptions, resume: str
) -> int:
    """Place the run's agents as the settings say, and follow it to its end. Returns its exit code.

    `resume` is what a user types to resume it, with "{run_dir}" in it.
    """
    folder = os.getcwd()
    run = placed_run(resolved, command, folder, environ, resume)
    if asked.as_json:
        run = replace(run, settings=(*run.settings, "--json"))
    plan = plan_for(resolved, run, environ, asked)
    if asked.shows or asked.dry_run:
        print(_shown(plan, asked))
        return 0
    say = _silent if asked.as_json else _say
    for note in plan.notes:
        say(note)
    if plan.placer == "kubernetes":
        return _apply(plan, run, resolved, asked)
    if plan.placer == "ssh":
        return _ssh(plan, run, asked, folder, say)
    if slurm.in_allocation(environ):
        return subprocess.call(plan.commands[0].argv)
    return _slurm(plan, run, resolved, asked, say)


def _shown(plan: LaunchPlan, asked: PlacingOptions) -> str:
    if asked.as_json or (asked.dry_run and not asked.shows):
        return json.dumps(plan.shown(), indent=2)
    return json.dumps(plan.manifest, indent=2) if plan.manifest is not None else plan.text()


def _slurm(plan: LaunchPlan, run: PlacedRun, resolved: Resolved, asked: PlacingOptions, say: Say) -> int:
    cluster = resolved.spec.cluster
    if cluster.code == "ship":
        target = Path(run.jobs_dir, f"code-{run.name}")
        copy_files(run.folder, tracked_files(run.folder), target)
        run = replace(run, folder=str(target))
        plan = slurm.plan(cluster, run)
    job = slurm_jobs.submit(plan, cluster, run)
    if asked.detach or cluster.array:
        facts = {"placer": "slurm", "job": job.number, "run_dir": run.run_dir, "output": str(job.output)}
        lines = [f"slurm {job.number} is submitted", f"mh status {run.run_dir}", f"scancel {job.number}"]
        print(json.dumps(facts) if asked.as_json else "\n".join(lines))
        return 0
    say(f"slurm {job.number} is submitted; its run directory is {run.run_dir}")
    return slurm_jobs.follow(job, resolved.spec.run.grace_s, say)


def _ssh(plan: LaunchPlan, run: PlacedRun, asked: PlacingOptions, folder: str, say: Say) -> int:
    code = ssh_hosts.run_hosts(plan, folder, say)
    if asked.detach and code == 0:
        first = next(command.host for command in plan.commands if command.first)
        facts = {"placer": "ssh", "hosts": [one.host for one in plan.commands if not one.code], "run_dir": run.run_dir}
        print(json.dumps(facts) if asked.as_json else f"started; on {first}: mh status {run.run_dir}")
    return code


def _apply(plan: LaunchPlan, run: PlacedRun, resolved: Resolved, asked: PlacingOptions) -> int:
    """kubectl reads the manifest from standard input: the key is in no file and in no argument."""
    argv = plan.commands[0].argv
    if shutil.which(argv[0]) is None:
        raise EnvironmentProblem(
            "kubectl is not installed here.",
            where="--on kubernetes",
            fix=["mh run --on kubernetes --print ... > run.json, and kubectl apply -f run.json elsewhere"],
        )
    try:
        done = subprocess.run(
            argv, input=json.dumps(plan.manifest), capture_output=True, text=True, timeout=KUBECTL_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentProblem(
            f"kubectl has not answered for {KUBECTL_TIMEOUT_S:g} s.", where="--on kubernetes"
        ) from error
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise EnvironmentProblem(
            f"kubectl did not apply the manifest: {said[-1] if said else done.returncode}",
            where="--on kubernetes",
            fix=_kubectl_fixes(done.stderr),
        )
    name = kubernetes.object_name(run.name)
    facts = {"placer": "kubernetes", "name": name, "applied": done.stdout.split("\n")[:-1]}
    print(
        json.dumps(facts) if asked.as_json else f"{done.stdout}{kubernetes.how_to_follow(resolved.spec.cluster, name)}"
    )
    return 0


def _kubectl_fixes(said: str) -> list[str]:
    if "no matches for kind" in said:
        return ["--manifest job, on a cluster without the JobSet controller", "installing JobSet"]
    return ["kubectl cluster-info", "mh run --on kubernetes --print ..., which prints the manifest"]


def _say(line: str) -> None:
    print(f"[mh] {line}", file=sys.stderr, flush=True)


def _silent(line: str) -> None:
    pass
