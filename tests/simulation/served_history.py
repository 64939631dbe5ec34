"""What happened in a simulated run with parameter servers, as the checker reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from manyhands.parameter_server.protocol.leases import Interval, Lease


class Content(NamedTuple):
    """A gradient in a row of memory, and what it was made of."""

    held: Lease
    based_on: int
    whole: bool
    """The weights of that version were there as long as they were read."""


class Part(NamedTuple):
    """What a server took for a slice: as it was reported, and as it found it. None: a worker was writing there."""

    held: Lease
    content: Content | None


@dataclass(frozen=True)
class Started:
    """A server's process, from what it found in memory."""

    at: float
    server: int
    low: int
    seen: frozenset[int]


@dataclass(frozen=True)
class Granted:
    at: float
    worker: int
    held: Lease
    version: int


@dataclass(frozen=True)
class Committed:
    at: float
    server: int
    step: int
    parts: tuple[Part, ...]
    low: int
    seen: frozenset[int]


@dataclass(frozen=True)
class Met:
    """A worker received a sync point, and what each server had applied then."""

    at: float
    worker: int
    step: int
    why: int
    applied: tuple[tuple[int, frozenset[int]], ...]


@dataclass(frozen=True)
class Left:
    at: float
    worker: int
    step: int


@dataclass(frozen=True)
class Died:
    at: float
    worker: int


@dataclass
class History:
    seed: int
    interval: Interval
    ahead: int | None
    """None: async."""
    backups: int
    num_servers: int
    num_rows: int
    events: list[Any] = field(default_factory=list)
    rows_used: int = 0
    """The most at any time, as are those below."""
    waiting: int = 0
    seen: int = 0
    dropped: int = 0
    """Contributions whose row had been filled with something else."""
    ended_at: float | None = None
    """When every worker had met after the last step, and every server had applied it."""

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]
