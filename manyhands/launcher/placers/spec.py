"""What a placer is asked for and what it answers, as plain values; and the objects that a script describes it by.

A placer is a pure function: `plan(cluster, job)` returns the files, commands and manifest that start a run, and
`shell` performs them. Nothing here starts, reads or writes anything. Start reading at `LaunchPlan`.
"""

from __future__ import annotations

import shlex
from typing import Any, ClassVar

import msgspec

from manyhands.errors import SpecError
from manyhands.spec.cluster_section import parse_hosts

__all__ = ["Kubernetes", "LaunchPlan", "PlacedRun", "PlanCommand", "PlanFile", "Slurm", "Ssh"]

SECRET_SHOWN = "(the run's key)"


class PlacedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The run that a placer starts: what `mh run` was asked for, without the question of where."""

    name: str
    """A name for the job: of the script, without its ending."""
    settings: tuple[str, ...]
    """Flags of `mh run`, those of the cluster left out."""
    script: tuple[str, ...]
    """The script or module, and its arguments."""
    folder: str
    """The directory that it runs in, on every host."""
    run_dir: str
    """Where the run writes; fixed here, so that it is found again after it was queued again."""
    jobs_dir: str
    """Private directory of this user for what belongs to jobs: their output, the key with which hosts join."""
    program: tuple[str, ...]
    """`mh` on the hosts, as an argument vector."""
    workers: int | None = None
    """On each host. None: one per accelerator."""
    environment: dict[str, str] = {}
    """Variables for `mh run`: how to resume; settings from this environment, where the placer does not pass it on."""


class PlanFile(msgspec.Struct, frozen=True):
    path: str
    text: str
    mode: int = 0o600


class PlanCommand(msgspec.Struct, frozen=True, kw_only=True):
    argv: tuple[str, ...]
    stdin: str = ""
    """What the command reads. A secret may be here, and nowhere else in a plan but in a Kubernetes Secret."""
    secret: bool = False
    """Standard input holds the run's key: it is not shown."""
    host: str = ""
    """ssh: the host on which it runs."""
    first: bool = False
    """Its output is the run's, and its exit code is the run's."""
    lifeline: bool = False
    """Standard input stays open while the command runs; its end asks the host to leave the run."""
    code: bool = False
    """Standard input is the tar of the run's files, in place of `stdin`."""


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What starts a run. "{job}" in a later command is what the first one printed: the job's number."""

    placer: str
    files: tuple[PlanFile, ...] = ()
    commands: tuple[PlanCommand, ...] = ()
    manifest: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()

    def shown(self) -> dict[str, Any]:
        """For --print and --json: plain values. The only secret in it is that of a manifest's Secret."""
        commands = [
            {
                "argv": list(one.argv),
                "stdin": SECRET_SHOWN if one.secret else one.stdin,
                **({"host": one.host} if one.host else {}),
            }
            for one in self.commands
        ]
        files = [msgspec.to_builtins(file) for file in self.files]
        plan = {"placer": self.placer, "files": files, "commands": commands, "notes": list(self.notes)}
        return plan | ({"manifest": self.manifest} if self.manifest is not None else {})

    def text(self) -> str:
        """For people: what would be typed, with what it would read below it."""
        lines = [f"# {note}" for note in self.notes]
        for command in self.commands:
            lines.append(shlex.join(command.argv) + (" <<'END'" if command.stdin and not command.secret else ""))
            if command.secret:
                lines[-1] += f"    # reads {SECRET_SHOWN} from standard input"
            elif command.stdin:
                lines += [command.stdin.rstrip("\n"), "END"]
        return "\n".join(lines)


class _PlacerSettings(msgspec.Struct, frozen=True, kw_only=True):
    placer: ClassVar[str] = ""

    def __post_init__(self) -> None:
        hosts = getattr(self, "hosts", None)
        if isinstance(hosts, list):
            raise SpecError("hosts is a list.", where=f"mh.{type(self).__name__}", fix=[f"hosts={tuple(hosts)!r}"])
        parse_hosts(hosts)

    def settings(self) -> dict[str, Any]:
        """The settings of [cluster] that this object gives, by name."""
        given = {field.name: getattr(self, field.name) for field in msgspec.structs.fields(self)}
        return {"on": self.placer} | {name: value for name, value in given.items() if value not in (None, ())}


class Slurm(_PlacerSettings, frozen=True, kw_only=True):
    """Train in a Slurm job, which this script submits: for `on=` of a strategy.

    `python train.py` then submits the job, shows its output and ends with its exit code; Ctrl-C cancels it.

    Args:
        hosts: How many, such as 4, or (2, 8) for hosts that join and leave while the others train.
        queue: The partition. Default: Slurm's.
        more_queue: The partition of hosts above the least number; one whose jobs may be preempted is fine.
        time: Time limit, such as "8:00:00". Default: the partition's.
        notice: Seconds before the limit at which the run commits a checkpoint and ends.
        requeue: Queue the run again after that; it resumes.
        cpus, gpus, memory: Of each host. Default: whole hosts.
        account: The account.
        setup: Shell lines that run on every host first, such as ("module load cuda/13",).
        extra: Options of sbatch, as they are.
        code: "here": the script has the same path on all hosts. "ship": a copy of the files that git tracks.
    """

    placer: ClassVar[str] = "slurm"
    hosts: int | str | tuple[int, int] = 1
    queue: str | None = None
    more_queue: str | None = None
    time: str | None = None
    notice: int | None = None
    requeue: bool | None = None
    cpus: int | None = None
    gpus: int | None = None
    memory: str | None = None
    account: str | None = None
    setup: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    code: str | None = None


class Ssh(_PlacerSettings, frozen=True, kw_only=True):
    """Train on hosts that this one reaches by ssh: for `on=` of a strategy.

    Args:
        hosts: Their names, such as "a,b:2": one worker on a, two on b. The first one coordinates.
        setup: Shell lines that run on every host first, such as ("source env/bin/activate",).
        extra: Options of ssh, as they are.
        code: "here": the script has the same path on all hosts. "ship": a copy of the files that git tracks.
    """

    placer: ClassVar[str] = "ssh"
    hosts: str | tuple[str, ...]
    setup: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    code: str | None = None


class Kubernetes(_PlacerSettings, frozen=True, kw_only=True):
    """Train in pods, by a manifest that this script applies with kubectl: for `on=` of a strategy.

    Args:
        image: The container image, which has the script and manyhands.
        hosts: How many pods, such as 4, or (2, 8) for pods that join and leave while the others train.
        queue: The Kueue queue. Default: none.
        namespace: Default: that of kubectl.
        manifest: "jobset", or "job" for clusters without the JobSet controller.
        cpus, gpus, memory: Of each pod.
        time: Time limit, such as "8:00:00".
    """

    placer: ClassVar[str] = "kubernetes"
    image: str
    hosts: int | str | tuple[int, int] = 1
    queue: str | None = None
    namespace: str | None = None
    manifest: str | None = None
    cpus: int | None = None
    gpus: int | None = None
    memory: str | None = None
    time: str | None = None
