"""Every message between agents and their coordinator: reports of a host's actual state, orders with its desired state.

Reports and orders are *states*, not commands: the agent sends the state that its host is in, the coordinator the state
that it should be in, both again every second. So a lost, repeated or late message is harmless. The decoder refuses
unknown fields and types, and every message names the generation and incarnation, or the term, that it belongs to.
The messages of `mh status`, `mh stop` and `mh scale` are in `status_messages`.
"""

from __future__ import annotations

from typing import Any, Literal

from manyhands.comm.transport import Message
from manyhands.control.messages.failure import Failure, WorkerEnd
from manyhands.control.messages.launch_request import HostSeat, WorkerCommand
from manyhands.control.messages.worker_messages import MessagePart, Refusal, StoreReply, StoreRequest, WorkerPosition

__all__ = [
    "CheckpointCommit",
    "FailedServer",
    "FromAgent",
    "FromCoordinator",
    "GroupMember",
    "HostPlan",
    "HostReport",
    "JobDescription",
    "LentHost",
    "MemberReport",
    "Orders",
    "PlannedWorker",
    "Relay",
    "Replay",
]


class CheckpointCommit(MessagePart, frozen=True, kw_only=True):
    step: int
    path: str


class MemberReport(MessagePart, frozen=True, kw_only=True):
    """One worker as its agent sees it. failed: it raised, or ended badly; it may still be alive until `clear`.

    left: it was dismissed from an elastic run, and has ended; exit code 0: without being killed.
    The default is a worker that was not started yet.
    """

    status: Literal["live", "done", "failed", "left"] = "live"
    pid: int = 0
    ended: bool = False
    """The process has ended: its agent has waited for it (waitpid)."""
    generation: str = ""
    """The generation that its messages are for; empty until it is admitted."""
    call: int = 0
    """The public call that it is in."""
    offers: int = 0
    """The public call in which it waits to be admitted; 0: it does not wait."""
    stranded: bool = False
    """It cannot continue in its generation, and waits for a newer one."""
    exit_code: int | None = None
    first_step: int | None = None
    """The step at which it began in this generation."""
    step: int | None = None
    phase: str = ""
    age_s: float = 0.0
    end: WorkerEnd | None = None
    ended_s_ago: float = 0.0


class FailedServer(MessagePart, frozen=True, kw_only=True):
    """A server that its agent will not restart: it died too often, or of an error that a restart cannot fix."""

    attempt: int
    end: WorkerEnd
    ended_s_ago: float = 0.0


class HostReport(Message, frozen=True, kw_only=True):
    """The state of a host. Sent every second and at every change."""

    run: str
    agent: str
    host: str
    slots: int
    term: int
    """The latest coordinator term that this agent has received."""
    versions: dict[str, str]
    data_address: str
    host_rank: int | None = None
    local: bool = False
    """This agent is the coordinator's parent process, on the same host: it cannot be lost without the coordinator."""
    master: tuple[str, int] | None = None
    generation: str | None = None
    members: dict[int, MemberReport] = {}
    """This host's workers, by incarnation."""
    clear: bool = True
    """No process of `generation` or of an earlier one is alive on this host."""
    stop: str | None = None
    stop_signal: int = 0
    run_dir: str | None = None
    log_base: int = 0
    committed: CheckpointCommit | None = None
    has_job: bool = False
    undecided: bool = False
    """It has joined, and not yet compared its copy of the program with the run's: until then it gets no worker."""
    program: str = ""
    """SHA-256 of the script that was named on this host, if it has to be the run's; see `JobDescription.program`."""
    refusal: str = ""
    """With `leaving`: why this host cannot run what the run's first host runs."""
    leaving: bool = False
    """This agent shuts down. In an elastic run its workers are dismissed; once `clear` is set too, it is gone."""
    workers_wanted: int | None = None
    """The number of the latest `mh scale`; the launching agent repeats it in every report."""
    replica: int = 1
    """How many workers one replica of the model takes, as reported by this host's workers."""
    servers_wanted: int | None = None
    """The same for servers."""
    servers: dict[int, str] = {}
    """Endpoint, for other hosts, of each server that this host has, by number; empty if it has none."""
    failed_server: FailedServer | None = None
    backup: str = ""
    """Endpoint at which this host keeps logs for other hosts' servers, if it does."""
    seat: HostSeat | None = None
    """The placer that placed this agent, if one did."""


class JobDescription(MessagePart, frozen=True, kw_only=True):
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
    """How many parameter servers the run starts with."""
    host: str = ""
    """The first host's name."""
    program: str = ""
    """SHA-256 of the file that `command` names; empty: it is not one file."""


class PlannedWorker(MessagePart, frozen=True, kw_only=True):
    """A process that should exist, in an elastic run.

    An incarnation is started at most once: one that has ended is reported as ended for as long as it is listed. It is
    started only after the previous process of its slot has ended.
    """

    slot: int
    incarnation: int
    joining: bool = False
    """It is started during an attempt and waits to be admitted, instead of being a member from its start."""


class GroupMember(MessagePart, frozen=True, kw_only=True):
    """One member of a group; its rank is its index in the list."""

    incarnation: int
    slot: int
    host: int


class HostPlan(MessagePart, frozen=True, kw_only=True):
    """One host's part in a generation. The fields from `workers` on are for elastic runs only."""

    generation: str
    attempt: int
    world_size: int
    num_hosts: int
    host: int
    first_rank: int
    incarnations: list[int]
    """Incarnations of this host's workers, in order of local rank."""
    master: tuple[str, int]
    why: str = ""
    """What ended the previous attempt or generation, in one line."""
    workers: list[PlannedWorker] = []
    """This host's workers, members or not. The agent kills any worker that is not in this list."""
    dismissed: list[int] = []
    """Incarnations of this host that are no longer in the group and are left to exit without being killed."""
    group: list[GroupMember] = []
    """All members, on every host, by rank."""
    lost: bool = False
    """A member of the previous generation is gone: all workers still in that one switch to this one at once."""
    call: int = 0
    """If workers join with this generation: the public call that they wait in."""
    servers: int = 0
    """How many parameter servers there should be, numbered from 0."""
    servers_at: dict[int, str] = {}
    """Endpoint of each server of any host, for other hosts, by number."""
    backups: list[str] = []
    """Endpoints where other hosts keep logs of this host's servers, the preferred one first."""
    living: dict[int, int] = {}
    """Slot, by incarnation, of each worker on any host that is not known to be dead, member or not."""


class LentHost(MessagePart, frozen=True, kw_only=True):
    """One host of the run, as its coordinator knows it."""

    agent: str
    name: str
    slots: int
    local: bool = False
    silent: bool = False
    leaving: bool = False
    seat: HostSeat | None = None
    """Its `seconds_left` is that of now."""


class Orders(Message, frozen=True, kw_only=True):
    """The state that a host should be in."""

    term: int
    revision: int = 0
    """Revision, within the term, of the state behind these orders: lower ones are late, and the agent ignores them."""
    run: str
    do: Literal["wait", "run", "stop", "end"]
    plan: HostPlan | None = None
    generation: str | None = None
    stop: str | None = None
    stop_signal: int = 0
    exit_code: int | None = None
    failure: Failure | None = None
    run_dir: str | None = None
    log_base: int = 0
    job: JobDescription | None = None
    environment: dict[str, str] | None = None
    """With `job`: the variables that the workers of all hosts share. Never written to disk."""
    positions: dict[int, WorkerPosition] = {}
    note: str = ""
    """Text to show to the user once, such as a refused join."""
    run_call: int = 0
    """The public call that the members of an elastic run are in."""
    well: bool = False
    """With "stop": the run is finished, and servers get time to end."""
    waiting_for: str = ""
    """Which hosts, servers or workers the run waits for before it can start."""
    hosts: list[LentHost] = []
    """All hosts, in order of joining; for the coordinator's own host only, which shows them."""


class Relay(StoreRequest, frozen=True, kw_only=True):
    """A worker's store request, forwarded by its agent."""

    agent: str = ""


class Replay(Message, frozen=True, kw_only=True):
    """Store values that a restarted coordinator no longer has and an agent has kept."""

    agent: str
    generation: str
    values: dict[str, bytes]


FromAgent = HostReport | Relay | Replay
FromCoordinator = Orders | StoreReply | Refusal
