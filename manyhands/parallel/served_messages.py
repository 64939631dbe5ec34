"""Every message between workers and parameter servers. Each can be sent again: a repeated one is harmless.

What is large stays in shared memory, where gradients and weights are; messages say where. Unknown fields and types are
refused by the decoder. `call` is the public call that a message belongs to; servers ignore those of another one.
"""

from __future__ import annotations

from typing import Any

import msgspec

from manyhands.parallel.leases import Course, Held

__all__ = [
    "Applied",
    "Ask",
    "Done",
    "Filled",
    "FromServer",
    "FromWorker",
    "Open",
    "Opened",
    "Reply",
    "Stand",
]


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="m", tag=True):
    call: int


class Open(_Message, frozen=True, kw_only=True):
    """A call begins: from the chief, to every server, until each has answered. Weights and states are in place."""

    course: Course
    layout: str
    """What the memory of weights and gradients is called: another one when other parameters are trained."""
    rows: int
    """How many gradients there is memory for."""
    groups: list[dict[str, Any]]
    """The optimizer's settings, by group of parameters."""
    counts: list[int]
    """By parameter: how many steps its states have seen; 0: it has none."""
    scheduler: dict[str, Any] | None


class Opened(_Message, frozen=True, kw_only=True):
    server: int


class Ask(_Message, frozen=True, kw_only=True):
    """A worker wants work, from the first server."""

    worker: int
    ticket: int
    met: int
    """The last step after which it has met the others."""
    told: int
    """How many updates of the run it knows of."""
    wish: int = 0
    holding: list[Held] = []


class Done(msgspec.Struct, frozen=True, array_like=True):
    """One update, as watchers see it; in the order in which updates were applied."""

    update: int
    step: int
    loss: float
    rows: int
    lr: float
    staleness: int
    grad_norm: float | None
    statistics: list[bytes]
    """What each slice made of the batch statistics, in order; and below, the buffers that the first one changed."""
    changes: bytes


class Reply(_Message, frozen=True, kw_only=True):
    """To an Ask: work, or with `meet` the step after which all meet now."""

    ticket: int
    version: int
    """All servers have applied the steps to this one."""
    work: Held | None = None
    meet: int | None = None
    why: int = 0
    done: list[Done] = []
    """Updates that the worker did not know of. If there are many, it is sent some, and asks again."""


class Filled(_Message, frozen=True, kw_only=True):
    """A gradient is in its row; to every server."""

    worker: int
    held: Held
    based_on: int
    total: float
    weight: float
    out: int = -1
    """Where new weights go: the number of this worker's own copy. -1: nowhere, they are read where they are."""
    absent: list[int] = []
    statistics: bytes = b""
    changes: bytes = b""


class Applied(_Message, frozen=True, kw_only=True):
    """To whoever sent a gradient of async: it counts, and the weights are in the worker's copy."""

    server: int
    step: int
    updates: int
    """How many there have been when the weights were copied."""


class Stand(_Message, frozen=True, kw_only=True):
    """Where a server stands, to the first one."""

    server: int
    low: int
    seen: list[int]
    has: list[tuple[int, int]]


FromWorker = Open | Ask | Filled | Stand
"""What a server accepts: Stand comes from other servers."""
FromServer = Opened | Reply | Applied
