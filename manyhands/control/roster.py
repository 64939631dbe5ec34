"""The state that membership decides over, as frozen values: hosts, members, the roster of a generation, the run.

What happens to it is in `membership`. The whole state goes to disk as it is, so a restarted coordinator has all of it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from manyhands.control.failure import Failure
from manyhands.control.messages import Commit, HostReport, Job
from manyhands.control.policy import Ended, Signature

__all__ = [
    "Event",
    "Heard",
    "Host",
    "Member",
    "Membership",
    "Outcome",
    "Output",
    "Persist",
    "Refuse",
    "Roster",
    "Settings",
    "Tell",
    "Ticked",
    "parse_generation",
]


class _Value(msgspec.Struct, frozen=True, kw_only=True):
    pass


class Settings(_Value, frozen=True, kw_only=True):
    run: str
    job: Job
    versions: dict[str, str]
    hosts_wanted: int = 1
    always_restart: bool = False
    resume: str = ""
    silent_after_s: float = 5.0
    """An agent unheard for this long is lost."""
    rejoin_wait_s: float = 60.0
    """How long the run waits for a lost host to come back and give its word."""
    gather_wait_s: float = 300.0


class Host(_Value, frozen=True, kw_only=True):
    agent: str
    name: str
    slots: int
    order: int
    local: bool
    data_address: str
    host_rank: int | None
    master: tuple[str, int] | None
    heard_at: float
    silent: bool = False


class Member(_Value, frozen=True, kw_only=True):
    """suspect: its host is silent; it may be alive. Only its agent's word makes it dead."""

    rank: int
    agent: str
    local_rank: int
    incarnation: int
    status: Literal["live", "suspect", "done", "failed", "dead"] = "live"
    exit_code: int | None = None
    pid: int = 0
    step: int | None = None
    phase: str = ""
    moved_at: float = 0.0


class Roster(_Value, frozen=True, kw_only=True):
    """The members of one generation."""

    generation: str
    attempt: int
    members: tuple[Member, ...]
    agents: tuple[str, ...]
    master: tuple[str, int]
    cleared: tuple[str, ...] = ()
    ends: tuple[Ended, ...] = ()
    first_step: int | None = None
    last_step: int | None = None
    why: str = ""


class Outcome(_Value, frozen=True, kw_only=True):
    exit_code: int
    reason: str
    failure: Failure | None = None


class Membership(_Value, frozen=True, kw_only=True):
    settings: Settings
    term: int
    counter: int = 0
    next_incarnation: int = 1
    hosts: dict[str, Host] = {}
    next_order: int = 0
    phase: Literal["gathering", "running", "stopping", "ended"] = "gathering"
    since: float = 0.0
    """When this phase began."""
    roster: Roster | None = None
    restarts: int = 0
    history: tuple[Signature, ...] = ()
    why: str = ""
    stop: str | None = None
    stop_signal: int = 0
    committed: Commit | None = None
    run_dir: str | None = None
    log_base: int = 0
    outcome: Outcome | None = None
    stale: int = 0
    """Messages refused because they spoke for an older generation or incarnation."""


class Heard(_Value, frozen=True, kw_only=True):
    report: HostReport


class Ticked(_Value, frozen=True, kw_only=True):
    pass


class Persist(_Value, frozen=True, kw_only=True):
    state: Membership


class Tell(_Value, frozen=True, kw_only=True):
    """Send this agent its orders."""

    agent: str


class Refuse(_Value, frozen=True, kw_only=True):
    agent: str
    what: str
    fix: list[str] = []


Event = Heard | Ticked
Output = Persist | Tell | Refuse


def parse_generation(text: str) -> tuple[int, int]:
    term, counter = text.split(".")
    return int(term), int(counter)
