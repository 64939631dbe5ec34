"""Every message between agents and their coordinator: how a host stands, and how it should stand.

Reports and orders are *states*, not commands: an agent says how its host stands, the coordinator says how it should
stand, both again every second. So a lost, repeated or late message is harmless. Unknown fields and types are
refused by the decoder, and everything carries the generation and incarnation, or the term, it speaks for. What people
ask is in `status_messages`.
"""

from __future__ import annotations

from typing import Any, Literal

from manyhands.comm.transport import Message
from manyhands.control.messages.failure import Failure, WorkerEnd
from manyhands.control.messages.launch_request import WorkerCommand
from manyhands.control.messages.worker_messages import Refusal, StoreReply, StoreRequest, Value, WorkerPosition

__all__ = [
    "Commit",
    "FailedServer",
    "FromAgent",
    "FromCoordinator",
    "HostReport",
    "Job",
    "MemberReport",
    "Orders",
    "Place",
    "Plan",
    "PlannedWorker",
    "Relay",
    "Replay",
]


class Commit(Value, frozen=True, kw_only=True):
    step: int
    path: str


class MemberReport(Value, frozen=True, kw_only=True):
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


class FailedServer(Value, frozen=True, kw_only=True):
    """A server that its agent does not start again: it died too often, or in a way that another try cannot change."""

    attempt: int
    end: WorkerEnd
    ended_s_ago: float = 0.0


class HostReport(Message, frozen=True, kw_only=True):
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


class Job(Value, frozen=True, kw_only=True):
    """What a joining host needs in order to start workers."""

    command: WorkerCommand
    flags: dict[str, Any]
    grace_s: float
    max_restarts: int
    threads: int | None = None
    most_workers: int = 0
    """Above 0: the run is elastic, and this is its upper bound over all hosts."""
    least_workers: int = 0
    heartbeat_s: float = 3.0
    hang_s: float = 10.0
    """Limits for workers of an elastic run; see `control.membership.hang_detection`."""
    servers: int = 0
    """Parameter servers of the run, at first."""


class PlannedWorker(Value, frozen=True, kw_only=True):
    """A process that should be there, in an elastic run.

    An incarnation is started at most once: one that has ended is reported as ended for as long as it is listed. It is
    started only when the process that had its slot before is gone.
    """

    slot: int
    incarnation: int
    joining: bool = False
    """It is started into a running attempt and offers itself, instead of being a member from its start."""


class Place(Value, frozen=True, kw_only=True):
    """One member of a group; its rank is its place in the list."""

    incarnation: int
    slot: int
    host: int


class Plan(Value, frozen=True, kw_only=True):
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


class Orders(Message, frozen=True, kw_only=True):
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


class Replay(Message, frozen=True, kw_only=True):
    """Values a restarted coordinator has forgotten and an agent has kept."""

    agent: str
    generation: str
    values: dict[str, bytes]


FromAgent = HostReport | Relay | Replay
FromCoordinator = Orders | StoreReply | Refusal
