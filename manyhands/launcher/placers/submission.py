"""From the settings of a launch to the run that a placer starts: which words go on, what is refused before it waits.

Pure: what a queue would only show in an hour is refused here, at once. Start reading at `placed_run`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from manyhands.control.messages.launch_request import WorkerCommand
from manyhands.control.run_directory import run_name
from manyhands.errors import EnvironmentProblem, SpecError, UsageError
from manyhands.launcher.placers.spec import PlacedRun
from manyhands.spec.cluster_section import ClusterSection
from manyhands.spec.load import KEYS, RESUME_VARIABLE, STATE_VARIABLE, Key, Resolved, flag_name

__all__ = ["check", "jobs_dir", "placed_run"]

HANDED = ("run_dir", "workers", "listen", "hosts_wanted")
"""Settings that the placer gives each host."""
LEAST_GRACE_S = 5
PROGRAM = (sys.executable, "-m", "manyhands.cli.main")


def placed_run(
    resolved: Resolved, command: WorkerCommand, folder: str, environ: Mapping[str, str], resume: str
) -> PlacedRun:
    spec = resolved.spec
    check(resolved)
    named = run_name(command.target)
    cluster = spec.cluster
    in_image = cluster.placer == "kubernetes"
    inherits = cluster.placer == "slurm"  # sbatch passes the environment on
    # Elsewhere these files have other directories above them.
    moved = folder if in_image or cluster.code == "ship" else None
    settings = _words(resolved, moved)
    if inherits and resolved.origins["run.grace_s"] == "default":
        # Slurm kills only at the limit; where it kills sooner after another notice, the agent knows it.
        settings.append(f"--grace={max(LEAST_GRACE_S, cluster.notice - 10)}")
    directory = spec.run.run_dir or os.path.join("runs", named)
    return PlacedRun(
        name=named,
        settings=tuple(settings),
        script=tuple(_script(command, moved)),
        folder=folder,
        run_dir=directory if in_image else os.path.join(folder, directory),
        jobs_dir=jobs_dir(environ),
        program=("mh",) if in_image or (cluster.setup and not inherits) else PROGRAM,
        workers=spec.launch.workers,
        environment={RESUME_VARIABLE: resume} | ({} if inherits else _from_environment(resolved)),
    )


def jobs_dir(environ: Mapping[str, str]) -> str:
    """As `meeting.meeting_file` finds it."""
    return os.path.abspath(environ.get(STATE_VARIABLE) or os.path.join(environ.get("HOME") or "", ".manyhands", "jobs"))


def _script(command: WorkerCommand, moved: str | None) -> list[str]:
    if command.kind == "call":
        raise UsageError(
            "A function is called by processes of this host only.", where="mh.launch(fn, on=...)",
            fix=["a script, and mh run --on ..., or strategy=mh.Mirrored(on=...) in it"],
        )  # fmt: skip
    if command.kind == "module":
        return ["-m", command.target, *command.args]
    return [_below(command.target, moved), *command.args]


def _below(path: str, moved: str | None) -> str:
    """The path, relative to the directory `moved` if that is another one on the hosts."""
    if moved is None:
        return path
    found = os.path.relpath(os.path.join(moved, path), moved)
    if found.startswith(os.pardir):
        what = f"{path} is not below {moved}, whose files are those that the hosts have."
        raise UsageError(what, where="the command line", fix=[f"the same in {os.path.dirname(os.path.abspath(path))}"])
    return found


def _words(resolved: Resolved, moved: str | None) -> list[str]:
    """The flags of `mh run` that have the same effect there: those given, and what else the agents need."""
    words = []
    if resolved.config_file:
        words.append(f"--config={_below(os.path.abspath(resolved.config_file), moved)}")
    for key in KEYS.values():
        value, origin = getattr(getattr(resolved.spec, key.section), key.name), resolved.origins[key.dotted]
        if key.section != "cluster" and key.name not in HANDED and _goes_on(key, value, origin):
            words.append(_as_flag(key, value))
    # The runs of an array have directories of their own, which their script exports.
    if resolved.origins["run.run_dir"].startswith("--") and resolved.spec.cluster.array is None:
        words.append(f"--run-dir={resolved.spec.run.run_dir}")
    return words


def _goes_on(key: Key, value: Any, origin: str) -> bool:
    # The script runs there, too, but `mh run` does not read it: workers and servers are started by its flags.
    of_launch = origin == "constructor" and key.section == "launch"
    return origin.startswith("--") or of_launch or (key.name == "insecure_data_plane" and bool(value))


def _as_flag(key: Key, value: Any) -> str:
    flag = flag_name(key.name)
    if isinstance(value, bool):
        return flag if value else f"--no-{flag[2:]}"
    shown = ":".join(str(one) for one in value) if isinstance(value, tuple) else value
    return f"{flag}={'none' if value is None else shown}"


def _from_environment(resolved: Resolved) -> dict[str, str]:
    """Settings that came from the environment, as it would be set there; those of the cluster left out."""
    keys = [key for key in KEYS.values() if key.section != "cluster" and key.name not in HANDED]
    found = {key.name: getattr(getattr(resolved.spec, key.section), key.name) for key in keys
             if resolved.origins[key.dotted].startswith("MANYHANDS_")}  # fmt: skip
    return {f"MANYHANDS_{name.upper()}": _as_text(value) for name, value in found.items()}


def _as_text(value: Any) -> str:
    return ":".join(str(one) for one in value) if isinstance(value, tuple) else str(value)


def check(resolved: Resolved) -> None:
    """Raise for what cannot work on these hosts."""
    cluster, launch = resolved.spec.cluster, resolved.spec.launch
    least, most = cluster.count
    if most > 1 and not launch.insecure_data_plane and cluster.placer != "here":
        raise EnvironmentProblem(
            f"Tensors between {most} hosts would be sent unencrypted: Gloo and NCCL have neither encryption nor "
            "authentication. Control messages are encrypted either way.",
            where=resolved.origins["cluster.hosts"],
            fix=[
                "--insecure-data-plane, on a network that only trusted hosts can read",
                "[launch] insecure_data_plane = true in ~/.config/manyhands.toml, for a cluster with such a network",
            ],
        )
    if launch.hosts_wanted > 1:
        raise SpecError(
            f"{launch.hosts_wanted} hosts are to join by hand, and {cluster.placer} is to place agents.",
            where=resolved.origins["launch.hosts_wanted"],
            fix=[f"--hosts {launch.hosts_wanted}"],
        )
    if cluster.array and (cluster.placer != "slurm" or most > least):
        why = "an array is Slurm's" if cluster.placer != "slurm" else "helper jobs belong to one run"
        raise SpecError(f"An array of runs is not possible here: {why}.", where="--array", fix=[f"--hosts {least}"])
    _check_elastic(cluster, resolved)


def _check_elastic(cluster: ClusterSection, resolved: Resolved) -> None:
    least, most = cluster.count
    elastic = resolved.spec.launch.elastic
    if most > least and elastic is not None:
        raise SpecError(
            f"The workers follow from hosts {least}:{most}, and elastic is {elastic[0]}:{elastic[1]}.",
            where=resolved.origins["launch.elastic"],
            fix=[f"--hosts {least}:{most} -n {resolved.spec.launch.workers or 1}", f"--hosts {most} with --elastic"],
        )
