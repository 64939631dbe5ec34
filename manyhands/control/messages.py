"""Every message of the control plane: worker to agent, and agent to coordinator. What people ask is in `questions`.

Reports and orders are *states*, not commands: an agent says how its host stands, the coordinator says how it should
stand, both again every second. So a lost, repeated or late message is harmless. Unknown fields and types are
refused by the decoder, and everything carries the generation and incarnation (or term) it speaks for.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from manyhands.comm.transport import Curve
from manyhands.control.failure import Failure, WorkerEnd
from manyhands.control.launch_request import WorkerCommand
from manyhands.events import Event
from manyhands.spec.seat import Group

__all__ = [
    "Announce",
    "Appointed",
    "Commit",
    "Committed",
    "FailedServer",
    "FromAgent",
    "FromCoordinator",
    "FromWorker",
    "Goodbye",
    "Heartbeat",
    "Hello",
    "HostReport",
    "Job",
    "Living",
    "MemberReport",
    "MemoryReply",
    "MemoryRequest",
    "Offer",
    "Orders",
    "Place",
    "Plan",
    "PlannedWorker",
    "PositionReply",
    "Publish",
    "Refusal",
    "Report",
    "RunFacts",
    "ServersWanted",
    "StopRequest",
    "StoreReply",
    "StoreRequest",
    "ToWorker",
    "Welcome",
    "WhereIsEveryone",
    "WorkerPosition",
]


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="m", tag=True):
    pass


class _Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


# ---- worker and agent ------------------------------------------------------------------------------------------


class _FromMember(_Message, frozen=True, kw_only=True):
    generation: str
    incarnation: int


class RunFacts(_Value, frozen=True, kw_only=True):
    """What the script's constructor arguments say about the run."""

    run_dir: str | None = None
    overwrite: bool = False
    strategy: str = ""
    slices: int = 0
    precision: str = ""
    script: str = ""
    spare: bool = False
    """From a server: one should be kept ready to take over."""
    backup: bool = False
    """Other hosts' servers want their logs kept here."""
    replica: int = 1
    """How many workers one takes, of which there may be more or fewer."""


class Hello(_FromMember, frozen=True, kw_only=True):
    rank: int
    pid: int
    facts: RunFacts


class Report(_FromMember, frozen=True, kw_only=True):
    step: int
    phase: str
    call: int = 0
    """The number of the public call that it is in."""


class Heartbeat(_FromMember, frozen=True, kw_only=True):
    """The process lives, and its interpreter runs. Whether it gets anywhere, reports tell."""

    stranded: bool = False
    """Its group came apart: a collective failed, and it waits for a newer generation."""


class Offer(_FromMember, frozen=True, kw_only=True):
    """A worker that was started into a running attempt waits in this public call to be admitted."""

    call: int


class Committed(_FromMember, frozen=True, kw_only=True):
    step: int
    path: str


class Publish(_FromMember, frozen=True, kw_only=True):
    event: Event


class Goodbye(_FromMember, frozen=True, kw_only=True):
    pass


class WhereIsEveryone(_FromMember, frozen=True, kw_only=True):
    ticket: int


class StoreRequest(_FromMember, frozen=True, kw_only=True):
    ticket: int
    op: Literal["get", "set", "wait", "add", "check", "delete"]
    keys: list[str]
    value: bytes = b""
    amount: int = 0
    timeout_s: float = 0.0


class StoreReply(_Message, frozen=True, kw_only=True):
    ticket: int
    ok: bool
    value: bytes = b""
    number: int = 0
    error: str = ""


class MemoryRequest(_FromMember, frozen=True, kw_only=True):
    """A region of the host's shared memory; every worker that asks for `name` gets the same one."""

    ticket: int
    name: str
    num_bytes: int
    ranks: int = 0
    """Above 0: these ranks meet there, and are woken when one of them is lost."""


class MemoryReply(_Message, frozen=True, kw_only=True):
    ticket: int
    offset: int = 0
    error: str = ""
    fix: list[str] = []


class WorkerPosition(_Value, frozen=True, kw_only=True):
    step: int
    phase: str
    age_s: float


class PositionReply(_Message, frozen=True, kw_only=True):
    ticket: int
    positions: dict[int, WorkerPosition]


class Welcome(_Message, frozen=True, kw_only=True):
    run: str
    run_dir: str
    stop: str | None = None
    run_call: int = 0
    """For a worker that joins: the public call that the run is in."""
    curve: Curve | None = None
    """Where the run has servers and several hosts: the keys of workers and servers towards each other."""
    clients: bytes = b""
    """To a server: the public key of those who may come in."""
    as_client: Curve | None = None
    """To a server: with which it comes to servers of other hosts."""


class Refusal(_Message, frozen=True, kw_only=True):
    """`error` is the name of a class in `manyhands.errors`."""

    error: str
    what: str
    where: str | None = None
    fix: list[str] = []


class StopRequest(_Message, frozen=True, kw_only=True):
    kind: str


class Announce(_Message, frozen=True, kw_only=True):
    """The newest generation, to a worker of an elastic run, and the public call that the run is in."""

    group: Group
    run_call: int = 0
    last_loss: str = ""
    """The newest generation that began with a loss. A worker that missed it tells from this that it has to hurry."""


class Living(_Message, frozen=True, kw_only=True):
    """To a server: the workers of all hosts that are alive, or not known to be dead."""

    workers: dict[int, int]
    """Their slots, by incarnation."""


class ServersWanted(_Message, frozen=True, kw_only=True):
    """To workers and servers: how many servers there should be, and where as in a seat.

    Those with higher numbers end when they are ready.
    """

    number: int
    servers: str
    backups: list[str] = []
    """Where other hosts keep logs."""


class Appointed(_Message, frozen=True, kw_only=True):
    """To a spare server: which one it is from now on, and where it listens, as in a seat."""

    server: int
    listen: str = ""


FromWorker = (
    Hello | Report | Heartbeat | Offer | Committed | Publish | Goodbye | WhereIsEveryone | StoreRequest | MemoryRequest
)
ToWorker = (
    Welcome
    | Refusal
    | StopRequest
    | StoreReply
    | PositionReply
    | MemoryReply
    | Announce
    | Living
    | ServersWanted
    | Appointed
)


# ---- agent and coordinator -------------------------------------------------------------------------------------


class Commit(_Value, frozen=True, kw_only=True):
    step: int
    path: str


class MemberReport(_Value, frozen=True, kw_only=True):
    """One worker as its agent sees it. failed: it raised, or ended badly; it may still be alive until `clear`.

    left: it was dismissed from an elastic run, and has ended; by itself, if its exit code is 0.
    """

    rank: int
    """Of a static run's worker. Where the run is elastic, its slot."""
    incarnation: int
    status: Literal["live", "done", "failed", "left"]
    pid: int
    ended: bool = False
    """The process is gone, by its agent's word: it has been waited for."""
    generation: str = ""
    """The generation that it speaks for; empty for one that has not been admitted yet."""
    call: int = 0
    """The public call that it is in."""
    offers: int = 0
    """It waits to be admitted, in this public call; 0: it does not."""
    stranded: bool = False
    """It cannot go on in its generation, and waits for a newer one."""
    exit_code: int | None = None
    first_step: int | None = None
    """Where it began in this generation."""
    step: int | None = None
    phase: str = ""
    age_s: float = 0.0
    greeted: bool = False
    """It said Hello: it speaks our protocol."""
    end: WorkerEnd | None = None
    ended_s_ago: float = 0.0


class FailedServer(_Value, frozen=True, kw_only=True):
    """A server that its agent does not start again: it died too often, or in a way that another try cannot change."""

    attempt: int
    end: WorkerEnd
    ended_s_ago: float = 0.0


class HostReport(_Message, frozen=True, kw_only=True):
    """How a host stands. Sent every second and at every change."""

    run: str
    agent: str
    host: str
    slots: int
    term: int
    """The latest coordinator term this agent has heard."""
    versions: dict[str, str]
    data_address: str
    host_rank: int | None = None
    local: bool = False
    """On the coordinator's own host, and its parent: cannot be lost without it."""
    master: tuple[str, int] | None = None
    generation: str | None = None
    members: list[MemberReport] = []
    clear: bool = True
    """No process of `generation` or of any earlier one is left on this host."""
    stop: str | None = None
    stop_signal: int = 0
    run_dir: str | None = None
    log_base: int = 0
    committed: Commit | None = None
    has_job: bool = False
    leaving: bool = False
    """This agent is going. Its workers are dismissed where the run is elastic; with `clear`, it is gone."""
    workers_wanted: int | None = None
    """What `mh scale` said last, from the launching agent, which repeats it in every report."""
    replica: int = 1
    """How many workers one takes, as this host's say."""
    servers_wanted: int | None = None
    """The same of servers."""
    servers: dict[int, str] = {}
    """The numbers of the servers that this host has, and where other hosts reach them; empty where there are none."""
    failed_server: FailedServer | None = None
    backup: str = ""
    """Where other hosts' servers have their logs kept by this host, if it does."""


class Job(_Value, frozen=True, kw_only=True):
    """What a joining host needs in order to start workers."""

    command: WorkerCommand
    flags: dict[str, Any]
    grace_s: float
    max_restarts: int
    threads: int | None = None
    most_workers: int = 0
    least_workers: int = 0
    """Above 0: the run is elastic, and this is its upper bound over all hosts."""
    heartbeat_s: float = 3.0
    hang_s: float = 10.0
    """Limits for workers of an elastic run; see `control.hang`."""
    servers: int = 0
    """Parameter servers of the run, at first."""


class PlannedWorker(_Value, frozen=True, kw_only=True):
    """A process that should be there, in an elastic run.

    An incarnation is started at most once: one that has ended is reported as ended for as long as it is listed. It is
    started only when the process that had its slot before is gone.
    """

    slot: int
    incarnation: int
    joining: bool = False
    """It is started into a running attempt and offers itself, instead of being a member from its start."""


class Place(_Value, frozen=True, kw_only=True):
    """One member of a group; its rank is its place in the list."""

    incarnation: int
    slot: int
    host: int


class Plan(_Value, frozen=True, kw_only=True):
    """One host's part in a generation. From `workers` on, of elastic runs only."""

    generation: str
    attempt: int
    world_size: int
    num_hosts: int
    host: int
    first_rank: int
    incarnations: list[int]
    """Of this host's workers, in order of local rank."""
    master: tuple[str, int]
    why: str = ""
    """What ended the attempt, or the generation, before, in one line."""
    workers: list[PlannedWorker] = []
    """This host's, members or not. Whoever is not in this list is killed."""
    dismissed: list[int] = []
    """Incarnations of this host that are not in the group any more and end by themselves."""
    group: list[Place] = []
    """All members, on every host, by rank."""
    lost: bool = False
    """A member of the generation before is gone: whoever is in that one goes over at once."""
    call: int = 0
    """With newcomers: the public call that they wait in."""
    servers: int = 0
    """How many parameter servers there should be, numbered from 0."""
    servers_at: dict[int, str] = {}
    """Where those of all hosts are reached from other hosts."""
    backups: list[str] = []
    """Where other hosts keep logs of this host's servers, the one to be preferred first."""
    living: dict[int, int] = {}
    """The slots, by incarnation, of all workers on every host that are not known to be dead, members or not."""


class Orders(_Message, frozen=True, kw_only=True):
    """How a host should stand."""

    term: int
    revision: int = 0
    """Of the state behind these orders, within the term: lower ones are late, and an agent ignores them."""
    run: str
    do: Literal["wait", "run", "stop", "end"]
    plan: Plan | None = None
    generation: str | None = None
    stop: str | None = None
    stop_signal: int = 0
    exit_code: int | None = None
    failure: Failure | None = None
    run_dir: str | None = None
    log_base: int = 0
    job: Job | None = None
    positions: dict[int, WorkerPosition] = {}
    note: str = ""
    """Something a person should read once, such as a refused join."""
    run_call: int = 0
    """The public call that the members of an elastic run are in."""
    well: bool = False
    """With "stop": the run is done, and servers have their time to end."""
    waiting_for: str = ""
    """What the run cannot go on without, while it gathers its hosts."""


class Relay(StoreRequest, frozen=True, kw_only=True):
    """A worker's store request on its way through the agent."""

    agent: str = ""


class Replay(_Message, frozen=True, kw_only=True):
    """Values a restarted coordinator has forgotten and an agent has kept."""

    agent: str
    generation: str
    values: dict[str, bytes]


FromAgent = HostReport | Relay | Replay
FromCoordinator = Orders | StoreReply | Refusal
