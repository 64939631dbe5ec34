"""What happened in a simulated run, as the checker reads it. Steps count from 1; 0 is the state before the first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Generation:
    """On the coordinator's disk."""

    at: float
    name: str
    attempt: int
    group: tuple[int, ...]
    lost: bool


@dataclass(frozen=True)
class Started:
    at: float
    incarnation: int
    slot: int
    agent: str


@dataclass(frozen=True)
class Entered:
    at: float
    incarnation: int
    generation: str


@dataclass(frozen=True)
class Applied:
    """A worker took a step, from what these workers contributed."""

    at: float
    incarnation: int
    generation: str
    attempt: int
    step: int
    slices: tuple[int, ...]
    contributors: tuple[int, ...]
    digest: int


@dataclass(frozen=True)
class Adopted:
    """A worker took over another's state."""

    at: float
    incarnation: int
    generation: str
    step: int
    digest: int


@dataclass(frozen=True)
class Committed:
    """A checkpoint, of the newest generation that has made one."""

    at: float
    generation: str
    attempt: int
    step: int


@dataclass(frozen=True)
class Refused:
    at: float
    incarnation: int
    generation: str


@dataclass(frozen=True)
class Fault:
    at: float
    what: str


@dataclass
class History:
    seed: int
    least: int
    num_slices: int
    num_steps: int
    events: list[Any] = field(default_factory=list)
    healed_at: float = 0.0
    budget: int = 1000
    stopped: bool = False
    """Someone asked for the end."""
    hosts_lost: bool = False
    """An agent was lost for good, so that a run may rightly end with 4."""
    ended_at: float | None = None
    exit_code: int | None = None
    reason: str = ""
    stale: int = 0
    """Reports of workers that the coordinator had declared gone."""
    surviving: list[str] = field(default_factory=list)
    """Generations in the log that the last coordinator left behind."""

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]
