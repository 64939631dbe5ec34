"""The names a user writes to say how a model is trained: plain settings. Who does the work is in `replicated`."""

from __future__ import annotations

from typing import Any

import msgspec

from manyhands.errors import SpecError

__all__ = ["Mirrored", "MultiWorker", "ParameterServer", "Single"]

MODES = ("sync", "async", "ssp")
DURABILITIES = ("upstream", "wal", "replica", "snapshot")


class _Settings(msgspec.Struct, frozen=True, kw_only=True):
    devices: tuple[str, ...] | None = None
    """Where the workers compute, one device each, such as ("cuda:0", "cuda:1"). Default: accelerators, else the CPU."""
    threads: int | None = None
    """Threads per worker. Default: cores / workers; with `exact`, 1."""


class Single(_Settings, frozen=True, kw_only=True):
    """One worker. The promise is the others': they end where this one ends."""

    name = "single"


class Mirrored(_Settings, frozen=True, kw_only=True):
    """Replicas on one host, one per worker."""

    workers: int | None = None
    reducer: str | None = None
    """How gradients travel: "exact" (the default), "bf16" or "int8"."""
    elastic: tuple[int, int] | None = None
    """Workers may die, come and go while the others train: at least and at most so many. Default: they may not."""
    name = "mirrored"


class MultiWorker(_Settings, frozen=True, kw_only=True):
    """Replicas on many hosts; `cluster` is a `ClusterSpec`, a `Server` or None for what the launcher says."""

    workers: int | None = None
    """Workers on each host."""
    cluster: Any = None
    reducer: str | None = None
    """How gradients travel: "exact" (the default), in half the bytes ("bf16") or in a quarter ("int8")."""
    elastic: tuple[int, int] | None = None
    """Over all hosts; hosts come and go, too."""
    name = "multi_worker"


class ParameterServer(_Settings, frozen=True, kw_only=True):
    """Weights on servers, processes of their own, to which workers push gradients and from which they pull."""

    servers: int | None = None
    """How many. Default: 2."""
    mode: str = "async"
    """async: a gradient is applied when it arrives. sync: once a step, as `Mirrored` does. ssp: on arrival, and no
    worker is more than `staleness` steps ahead of the slowest living one."""
    staleness: int = 3
    backup_workers: int = 0
    """sync: a step closes without the slowest so many."""
    aggregate: int | None = None
    """sync: how many batches make one update. Default: as many as there are workers."""
    damping: Any = None
    """async and ssp: how much less a stale gradient counts. Default: no less."""
    place: Any = None
    """Which server has which tensor, where that is not left to us."""
    durability: str = "upstream"
    """What a server's death may cost: "upstream", "wal", "replica" or "snapshot"."""
    workers: int | None = None
    """Workers on each host."""
    elastic: tuple[int, int] | None = None
    """At least and at most so many workers, over all hosts. Default: from 1 to all of them."""
    cluster: Any = None
    """A `Server`, or None for what the launcher says."""
    name = "parameter_server"

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, MODES)
        _one_of("durability", self.durability, DURABILITIES)
        _at_least("servers", self.servers, 1)
        _at_least("staleness", self.staleness, 0)
        _at_least("backup_workers", self.backup_workers, 0)
        _at_least("aggregate", self.aggregate, 1)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise SpecError(
            f"ParameterServer: {name} is {value!r}, but must be one of {', '.join(known)}.",
            fix=[f'{name}="{right}"' for right in known],
        )


def _at_least(name: str, value: int | None, least: int) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (whole and value >= least):
        raise SpecError(
            f"ParameterServer: {name} is {value!r}, but must be a whole number from {least} on.",
            fix=[f"{name}={least}"],
        )
