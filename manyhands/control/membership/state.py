"""The state that membership decides over, as frozen values: hosts, members, the roster of a generation, the run.

What happens to it is in `react`. The whole state goes to disk as it is, so a restarted coordinator has all of it.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec.structs import replace

from manyhands.control.membership.failure_policy import Ended, Signature
from manyhands.control.messages.agent_messages import Commit, HostReport, Job
from manyhands.control.messages.failure import Failure

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
    "Slot",
    "Tell",
    "Ticked",
    "begun",
    "next_generation",
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
    elastic: tuple[int, int] | None = None
    """The fewest and the most workers, over all hosts. None: the run restarts as a whole, with as many as it had."""
    begin_with_fewer_s: float | None = None
    """Of an elastic run: how long the first attempt waits for further hosts, once those that are there have every
    server and the fewest workers. None: until all hosts are there."""
    workers_wanted: int | None = None
    """Of an elastic run, at first. None: as many as its hosts have slots."""


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
    servers: dict[int, str] = {}
    """Those that it has, and where other hosts reach them."""
    backup: str = ""
    """Where it keeps other hosts' logs."""
    leaving: bool = False
    """Its agent is going: it takes no new workers, and those it has are dismissed."""


class Member(_Value, frozen=True, kw_only=True):
    """suspect: its host is silent; it may be alive. Only its agent's word makes it dead.

    In an elastic attempt also a worker that is not in the group yet, or not any more; its rank is then -1.
    """

    rank: int
    agent: str
    local_rank: int
    incarnation: int
    status: Literal["live", "suspect", "done", "failed", "dead", "left"] = "live"
    exit_code: int | None = None
    pid: int = 0
    step: int | None = None
    phase: str = ""
    moved_at: float = 0.0
    # From here on of elastic attempts only.
    slot: int = 0
    ended: bool = False
    end: Ended | None = None
    generation: str = ""
    """The one that it speaks for."""
    call: int = 0
    offers: int = 0
    offered_at: float = 0.0
    catch_up: int | None = None
    """Of a newcomer: the run's step when it was admitted. Until it reports that step it has no state of its own."""
    done_at: float = 0.0
    stranded_at: float = 0.0
    """When it was first heard to wait for a newer generation than its own; 0: it does not."""
    leads_since: str = ""
    """The generation in which it became the chief."""


class Slot(_Value, frozen=True, kw_only=True):
    """A place for a worker on one host, and what is known of those who died in it."""

    agent: str
    died_at_step: int | None = None
    died_of: Signature | None = None
    quick_deaths: int = 0
    """In a row, counted against the budget."""
    refill_at: float = 0.0
    retired: bool = False
    """Not filled again: the budget is spent, or its worker was done."""


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
    # From here on of elastic attempts only.
    joining: tuple[Member, ...] = ()
    dismissed: tuple[Member, ...] = ()
    slots: dict[int, Slot] = {}
    lost: bool = False
    call: int = 0
    before: str = ""
    """The generation that members leave at a step's end for this one: until then both are open."""
    torn: bool = False
    """Someone who was to leave at a step's end is gone before it, so that step will not end."""
    exit_codes: tuple[int, ...] = ()
    """Of workers that were done and are in no later group."""
    chief_done_in: str = ""
    """The generation whose chief was done and left the group: the run is finished if the others were done in it too."""
    last_loss: tuple[Ended, ...] = ()
    """What the generation before was lost to."""
    apart: int = 0
    """How often in a row, without a step in between, the group came apart although nobody was gone."""
    apart_at_step: int | None = None
    short_since: float | None = None
    """When the group fell below the lower bound."""
    failed_server: Ended | None = None
    """A server that its agent does not start again: without it nobody can go on."""
    fatal: bool = False
    """A worker failed in a way that another try cannot change."""


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
    could_begin_at: float | None = None
    """While hosts are awaited at the start: since when those that are there are enough to begin without the rest."""
    roster: Roster | None = None
    restarts: int = 0
    deaths: int = 0
    """Of single workers in elastic attempts, as far as they count against the restart budget."""
    workers_wanted: int | None = None
    servers_wanted: int | None = None
    """As `mh scale` said last."""
    replica: int = 1
    """How many workers, in slots that follow each other, go and come together."""
    revision: int = 0
    """Grows with every state that is persisted; orders carry it, so that an agent can tell older ones."""
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


def next_generation(state: Membership) -> str:
    return f"{state.term}.{state.counter + 1}"


def begun(
    state: Membership,
    members: tuple[Member, ...],
    agents: tuple[str, ...],
    master: tuple[str, int],
    now: float,
    slots: dict[int, Slot] | None = None,
) -> Membership:
    """An attempt begins with these members; those of an elastic run have slots."""
    roster = Roster(
        generation=next_generation(state),
        attempt=state.restarts + 1,
        members=members,
        agents=agents,
        master=master,
        why=state.why,
        slots=slots or {},
    )
    return replace(
        state,
        counter=state.counter + 1,
        next_incarnation=state.next_incarnation + len(members),
        roster=roster,
        phase="running",
        since=now,
    )
