"""The names a user writes to say how a model is trained: plain settings. Who does the work is in `replicated`."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["Mirrored", "MultiWorker", "Single"]


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
