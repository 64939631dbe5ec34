"""[cluster]: the hosts that a run uses, and who places agents on them.

A *cluster* is the hosts that runs use; a *placer* (Slurm, Kubernetes, ssh) starts an agent on each of them. A site
describes its cluster once in ~/.config/manyhands.toml, a run in its config file, by flags or by `mh.Slurm(...)`. Pure.
Start reading at `ClusterSection`.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

import msgspec

from manyhands.errors import SpecError

__all__ = ["MINUTE_S", "ClusterSection", "HostCount", "NamedHost", "minutes_and_seconds", "parse_hosts", "seconds_of"]

MINUTE_S = 60
MOST_HOSTS = 100_000
_TIME = re.compile(r"(?:(?P<days>\d{1,4})-)?(?P<clock>\d{1,6}(?::\d{1,2}){0,2})")
_MEMORY = re.compile(r"[1-9]\d{0,8}[MGT]")
# A name that began with "-" would be an option of ssh.
_NAME = re.compile(
    r"(?P<name>(?:[\w.-]{1,64}@)?[A-Za-z0-9_][\w.-]{0,252}|\[[0-9A-Fa-f:.]+\])(?::(?P<workers>\d{1,4}))?"
)
_PLAIN = re.compile(r"[\w.@+/-]{1,200}")


class HostCount(NamedTuple):
    least: int
    most: int
    """More than `least`: hosts join and leave while the run continues."""


class NamedHost(NamedTuple):
    name: str
    workers: int | None


class ClusterSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    on: Literal["here", "slurm", "ssh", "kubernetes"] = "here"
    """Who starts an agent on each host. here: this process is the agent of this host."""
    hosts: int | str | tuple[int | str, ...] | None = None
    """How many: 4, or [2, 8] for hosts that join and leave. For ssh their names: ["a", "b:2"], b with 2 workers."""
    cpus: int | None = None
    """Cores of each host. Default: the whole host."""
    gpus: int | None = None
    """Accelerators of each host; without `workers`, each gets a worker."""
    memory: str | None = None
    """Of each host, such as "64G"."""
    time: str | None = None
    """How long the job may take: "8:00:00", "2-00:00:00" (two days), or minutes. Default: the queue's."""
    notice: int = 60
    """Seconds before the end of the time limit at which the run is asked to commit a checkpoint and end."""
    requeue: bool = True
    """A run that was stopped with a committed checkpoint (exit code 75) is queued again, and resumes."""
    queue: str | None = None
    """Slurm's partition."""
    more_queue: str | None = None
    """Where hosts above the least number are requested; a queue whose jobs may be preempted is fine."""
    account: str | None = None
    array: str | None = None
    """Slurm: so many separate runs of the same command, such as "0-3%2"."""
    setup: tuple[str, ...] = ()
    """Shell lines that run on every host before the agent, such as "module load cuda/13"."""
    extra: tuple[str, ...] = ()
    """Options of the placer's own command (sbatch, ssh), as they are."""
    code: Literal["here", "ship"] = "here"
    """here: the script is on every host under the same path. ship: the files that git tracks are copied."""
    image: str | None = None
    """Kubernetes: the container image. It has the script, and manyhands installed."""
    namespace: str | None = None
    """Kubernetes: the namespace. Default: kubectl's."""
    manifest: Literal["jobset", "job"] = "jobset"
    """Kubernetes: a JobSet (its controller is a separate installation), or a Job that every cluster has."""

    def __post_init__(self) -> None:
        count = parse_hosts(self.hosts)
        for name, least in (("cpus", 1), ("gpus", 0), ("notice", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise SpecError(
                    f"[cluster] {name} is {value}, but must be at least {least}.", fix=[f"{name} = {least}"]
                )
        if isinstance(count, list) and self.on not in ("here", "ssh"):
            raise SpecError(
                f"[cluster] hosts names hosts, which {self.on} chooses itself.", fix=["hosts = 2", 'on = "ssh"']
            )
        if isinstance(count, HostCount) and self.on == "ssh":
            raise SpecError(f"[cluster] hosts is {self.hosts}, but ssh needs names.", fix=['hosts = "a,b:2"'])
        if self.time is not None:
            seconds_of(self.time)
        if self.memory is not None and not _MEMORY.fullmatch(self.memory):
            raise SpecError(f'[cluster] memory is "{self.memory}", but must be like 64G.', fix=['memory = "64G"'])
        if self.array is not None and not re.fullmatch(r"[\d,:%-]{1,200}", self.array):
            raise SpecError(f'[cluster] array is "{self.array}", but must be like 0-3%2.', fix=['array = "0-3%2"'])
        self._check_words()

    def _check_words(self) -> None:
        for name in ("queue", "more_queue", "account", "namespace"):
            value = getattr(self, name)
            if value is not None and not _PLAIN.fullmatch(value):
                raise SpecError(f'[cluster] {name} is "{value}", which is no name.', fix=[f'{name} = "name"'])
        for name in ("setup", "extra"):
            for line in getattr(self, name):
                if not line or any(ord(letter) < 32 for letter in line):
                    raise SpecError(f"[cluster] {name} has a line that is empty or has control characters.")

    @property
    def count(self) -> HostCount:
        found = parse_hosts(self.hosts)
        return HostCount(len(found), len(found)) if isinstance(found, list) else found

    @property
    def named_hosts(self) -> list[NamedHost]:
        found = parse_hosts(self.hosts)
        return found if isinstance(found, list) else []

    @property
    def placer(self) -> str:
        """`on`, or ssh where hosts have names."""
        return "ssh" if self.on == "here" and self.named_hosts else self.on


def parse_hosts(value: int | str | tuple[int | str, ...] | None) -> HostCount | list[NamedHost]:
    """4, (2, 8), "4" and "2:8" are numbers of hosts; "a,b:2" and ("a", "b:2") are names, some with workers."""
    if value is None:
        return HostCount(1, 1)
    if isinstance(value, tuple) and value and all(isinstance(one, int) for one in value):
        return _count(value, [int(one) for one in value])
    if isinstance(value, int) or (isinstance(value, str) and re.fullmatch(r"\d{1,6}(:\d{1,6})?", value)):
        return _count(value, [int(one) for one in str(value).split(":")])
    words = (
        [one if isinstance(one, str) else "" for one in value]
        if isinstance(value, tuple)
        else [one.strip() for one in value.split(",")]
    )
    named = [_NAME.fullmatch(word) for word in words]
    if not named or not all(named):
        wrong = next((word for word, match in zip(words, named, strict=True) if match is None), "")
        what = f'[cluster] hosts has "{wrong[:80]}", which is neither a number of hosts nor the name of one.'
        raise SpecError(what, fix=["hosts = 4", "hosts = [2, 8]", 'hosts = "a,b:2"'])
    hosts = [NamedHost(one["name"], int(one["workers"]) if one["workers"] else None) for one in named if one]
    return _distinct(hosts)


def _distinct(hosts: list[NamedHost]) -> list[NamedHost]:
    names = [host.name for host in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        workers = sum(host.workers or 1 for host in hosts if host.name == twice)
        what = f'[cluster] hosts names "{twice}" twice; one agent starts all workers of a host.'
        raise SpecError(what, fix=[f'hosts = "{twice}:{workers}"'])
    none = next((host.name for host in hosts if host.workers == 0), None)
    if none is not None:
        raise SpecError(f'[cluster] hosts gives "{none}" 0 workers.', fix=[f'hosts = "{none}:1"', f"without {none}"])
    return hosts


def _count(value: object, numbers: list[int]) -> HostCount:
    least, most = numbers[0], numbers[-1]
    if len(numbers) > 2 or not 1 <= least <= most <= MOST_HOSTS:
        shown = ":".join(str(one) for one in numbers)
        least, most = max(1, min(numbers)), max(1, *numbers[:2])
        what = f"[cluster] hosts is {shown}, but must be a number of hosts, or the least and the most."
        raise SpecError(what, fix=[f"hosts = {least}", f"hosts = [{least}, {most}]"])
    return HostCount(least, most)


def seconds_of(time: str) -> int:
    """ "90" (minutes), "30:00" (minutes and seconds), "8:00:00" or "2-00:00:00", as Slurm reads them."""
    found = _TIME.fullmatch(time)
    if found is None:
        raise SpecError(f'[cluster] time is "{time}", but must be like 8:00:00.', fix=['time = "8:00:00"'])
    parts = [int(part) for part in found["clock"].split(":")]
    if found["days"] is not None:  # then it begins with hours
        parts += [0] * (3 - len(parts))
    elif len(parts) < 3:
        parts = [0, *parts, *[0] * (2 - len(parts))]
    hours, minutes, seconds = parts
    total = ((int(found["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if total <= 0:
        raise SpecError(f'[cluster] time is "{time}", which is no time.', fix=['time = "8:00:00"'])
    return total


def minutes_and_seconds(seconds: int) -> str:
    return f"{seconds // MINUTE_S}:{seconds % MINUTE_S:02}"
