"""The state of membership as frozen values: hosts, members, the current attempt (the roster), the run.

Its transitions are in `react`. The state is written to disk as it is, so a restarted coordinator has all of it.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec.structs import replace

from manyhands.control.membership.failure_policy import EndedWorker, Signature
from manyhands.control.messages.agent_messages import CheckpointCommit, HostReport, JobDescription, MemberReport
from manyhands.control.messages.failure import Failure
from manyhands.control.messages.launch_request import HostSeat

__all__ = [
    "AttemptState",
    "Event",
    "Host",
    "Member",
    "Membership",
    "MembershipSettings",
    "Output",
    "Persist",
    "Refuse",
    "ReportReceived",
    "RunOutcome",
    "SendOrders",
    "Slot",
    "Ticked",
    "begun",
    "next_generation",
    "parse_generation",
]


class _Value(msgspec.Struct, frozen=True, kw_only=True):
    pass


class MembershipSettings(_Value, frozen=True, kw_only=True):
    run: str
    job: JobDescription
    versions: dict[str, str]
    hosts_wanted: int = 1
    always_restart: bool = False
    resume: str = ""
    silent_after_s: float = 5.0
    """An agent that sends nothing for this long counts as lost."""
    rejoin_wait_s: float = 60.0
    """How long the run waits for a lost host to return and confirm that its workers are dead."""
    gather_wait_s: float = 300.0
    elastic: tuple[int, int] | None = None
    """The fewest and the most workers, over all hosts. None: the run restarts as a whole, with as many as it had."""
    begin_with_fewer_s: float | None = None
    """Elastic runs: how long the first attempt waits for more hosts, once the present ones have every server and the
    fewest workers. None: until all hosts have joined."""
    workers_wanted: int | None = None
    """Elastic runs: the initial number. None: as many as its hosts have slots."""


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
    """Endpoint, for other hosts, of each server on this host, by number."""
    backup: str = ""
    """Endpoint at which it keeps logs for other hosts' servers."""
    seat: HostSeat | None = None
    undecided: bool = False
    """It may still find that it cannot run the program."""
    leaving: bool = False
    """Its agent shuts down: it gets no new workers, and those that it has are dismissed."""


class Member(_Value, frozen=True, kw_only=True):
    """A worker: what the coordinator decided about it, and what its agent last reported.

    suspect: its host is silent, and it may be alive. It counts as dead only after its agent has said so.
    In an elastic attempt also a worker that is not in the group yet, or no longer; its rank is then -1.
    """

    rank: int
    agent: str
    incarnation: int
    status: Literal["live", "suspect", "done", "failed", "dead", "left"] = "live"
    report: MemberReport = MemberReport()
    """The last one; the first with `ended`, or "done", is kept, and of its end the first description."""
    reported_at: float = 0.0
    failed_at: float = 0.0
    """When it failed, if its report says how it ended."""
    # The fields below are for elastic attempts only.
    slot: int = 0
    offered_at: float = 0.0
    catch_up: int | None = None
    """For a newcomer: the run's step when it was admitted. Until it reports that step it lacks the run's state."""
    stranded_at: float = 0.0
    """When it first reported that it waits for a newer generation; 0: it does not wait."""
    leads_since: str = ""
    """The generation in which it became the chief."""


class Slot(_Value, frozen=True, kw_only=True):
    """Capacity for one worker on a host, and the record of workers that died in it."""

    agent: str
    died_at_step: int | None = None
    died_of: Signature | None = None
    quick_deaths: int = 0
    """Consecutive deaths that count against the budget."""
    refill_at: float = 0.0
    retired: bool = False
    """Not to be filled again: the budget is spent, or its worker was done."""


class AttemptState(_Value, frozen=True, kw_only=True):
    """One attempt, with the members of its current generation."""

    generation: str
    attempt: int
    members: tuple[Member, ...]
    agents: tuple[str, ...]
    master: tuple[str, int]
    cleared: tuple[str, ...] = ()
    ends: tuple[EndedWorker, ...] = ()
    first_step: int | None = None
    last_step: int | None = None
    why: str = ""
    # The fields below are for elastic attempts only.
    joining: tuple[Member, ...] = ()
    dismissed: tuple[Member, ...] = ()
    slots: dict[int, Slot] = {}
    lost: bool = False
    call: int = 0
    before: str = ""
    """The previous generation, if members switch from it at the end of a step: until then both are valid."""
    torn: bool = False
    """A worker that was to leave at the end of a step died before it, so that step cannot complete."""
    exit_codes: tuple[int, ...] = ()
    """Exit codes of workers that were done and are in no later group."""
    chief_done_in: str = ""
    """The generation whose chief was done and left: the run is finished if its other members are done in it, too."""
    last_loss: tuple[EndedWorker, ...] = ()
    """The ends of workers that broke the previous generation."""
    apart: int = 0
    """How often in a row, without a completed step in between, a collective failed although no member was gone."""
    apart_at_step: int | None = None
    short_since: float | None = None
    """When the group became smaller than the lower bound."""
    failed_server: EndedWorker | None = None
    """A server that its agent will not restart: without it no worker can continue."""
    fatal: bool = False
    """A worker failed with an error that a retry cannot fix."""


class RunOutcome(_Value, frozen=True, kw_only=True):
    exit_code: int
    reason: str
    failure: Failure | None = None


class Membership(_Value, frozen=True, kw_only=True):
    settings: MembershipSettings
    term: int
    counter: int = 0
    next_incarnation: int = 1
    hosts: dict[str, Host] = {}
    next_order: int = 0
    phase: Literal["gathering", "running", "stopping", "ended"] = "gathering"
    since: float = 0.0
    """When this phase began."""
    could_begin_at: float | None = None
    """While the run waits for hosts at its start: since when the present ones suffice to begin without the rest."""
    roster: AttemptState | None = None
    restarts: int = 0
    deaths: int = 0
    """Deaths of single workers in elastic attempts that count against the restart budget."""
    workers_wanted: int | None = None
    servers_wanted: int | None = None
    """The numbers of the latest `mh scale`."""
    replica: int = 1
    """How many workers, in consecutive slots, form one replica and are added and removed together."""
    revision: int = 0
    """Increases with every persisted state; orders carry it, so that an agent recognises older ones."""
    history: tuple[Signature, ...] = ()
    why: str = ""
    stop: str | None = None
    stop_signal: int = 0
    committed: CheckpointCommit | None = None
    run_dir: str | None = None
    log_base: int = 0
    outcome: RunOutcome | None = None
    stale: int = 0
    """Number of messages refused because they were for an older generation or incarnation."""


class ReportReceived(_Value, frozen=True, kw_only=True):
    report: HostReport


class Ticked(_Value, frozen=True, kw_only=True):
    pass


class Persist(_Value, frozen=True, kw_only=True):
    state: Membership


class SendOrders(_Value, frozen=True, kw_only=True):
    """Send this agent its orders."""

    agent: str


class Refuse(_Value, frozen=True, kw_only=True):
    agent: str
    what: str
    fix: list[str] = []


Event = ReportReceived | Ticked
Output = Persist | SendOrders | Refuse


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
    """The state in which an attempt begins with these members; those of an elastic run have slots."""
    roster = AttemptState(
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
