"""Every message between a worker or server and its agent; between agents and coordinator: `agent_messages`.

The decoder refuses unknown fields and types, and every message from a worker names the generation and incarnation
that it belongs to.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from manyhands.comm.transport import Curve, Message
from manyhands.events import Event
from manyhands.spec.worker_identity import Group

__all__ = [
    "Announce",
    "Appointed",
    "CommitNotice",
    "FromWorker",
    "Goodbye",
    "Heartbeat",
    "LiveWorkers",
    "MemoryReply",
    "MemoryRequest",
    "MessagePart",
    "Offer",
    "PositionReply",
    "PositionRequest",
    "Publish",
    "Refusal",
    "RunFacts",
    "ServersWanted",
    "StopRequest",
    "StoreReply",
    "StoreRequest",
    "ToWorker",
    "WorkerHello",
    "WorkerPosition",
    "WorkerReport",
    "WorkerWelcome",
]


class MessagePart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of a message."""


class _FromMember(Message, frozen=True, kw_only=True):
    generation: str
    incarnation: int


class RunFacts(MessagePart, frozen=True, kw_only=True):
    """Facts about the run that follow from the script's constructor arguments."""

    run_dir: str | None = None
    overwrite: bool = False
    strategy: str = ""
    slices: int = 0
    precision: str = ""
    script: str = ""
    spare: bool = False
    """From a server: a spare server should be kept ready to take over."""
    backup: bool = False
    """This host should keep logs for other hosts' servers."""
    replica: int = 1
    """How many workers one replica of the model takes; an elastic run adds and removes whole replicas."""


class WorkerHello(_FromMember, frozen=True, kw_only=True):
    rank: int
    pid: int
    facts: RunFacts


class WorkerReport(_FromMember, frozen=True, kw_only=True):
    step: int
    phase: str
    call: int = 0
    """The number of the public call that the worker is in."""


class Heartbeat(_FromMember, frozen=True, kw_only=True):
    """The process is alive and its interpreter runs. Progress is in the reports."""

    stranded: bool = False
    """A collective of its group failed, and it waits for a newer generation."""


class Offer(_FromMember, frozen=True, kw_only=True):
    """A worker that was started during an attempt waits in this public call to be admitted."""

    call: int


class CommitNotice(_FromMember, frozen=True, kw_only=True):
    step: int
    path: str


class Publish(_FromMember, frozen=True, kw_only=True):
    event: Event


class Goodbye(_FromMember, frozen=True, kw_only=True):
    pass


class PositionRequest(_FromMember, frozen=True, kw_only=True):
    ticket: int


class StoreRequest(_FromMember, frozen=True, kw_only=True):
    ticket: int
    op: Literal["get", "set", "wait", "add", "check", "delete"]
    keys: list[str]
    value: bytes = b""
    amount: int = 0
    timeout_s: float = 0.0


class StoreReply(Message, frozen=True, kw_only=True):
    ticket: int
    ok: bool
    value: bytes = b""
    number: int = 0
    error: str = ""


class MemoryRequest(_FromMember, frozen=True, kw_only=True):
    """Request for a region of the host's shared memory; every worker that requests `name` gets the same one."""

    ticket: int
    name: str
    num_bytes: int
    ranks: int = 0
    """Above 0: this many ranks synchronise through the region, and are woken when one of them is lost."""


class MemoryReply(Message, frozen=True, kw_only=True):
    ticket: int
    offset: int = 0
    error: str = ""
    fix: list[str] = []


class WorkerPosition(MessagePart, frozen=True, kw_only=True):
    step: int
    phase: str
    age_s: float


class PositionReply(Message, frozen=True, kw_only=True):
    ticket: int
    positions: dict[int, WorkerPosition]


class WorkerWelcome(Message, frozen=True, kw_only=True):
    run: str
    run_dir: str
    stop: str | None = None
    run_call: int = 0
    """For a joining worker: the public call that the run is in."""
    curve: Curve | None = None
    """If the run has servers and several hosts: the keys between workers and servers."""
    clients: bytes = b""
    """For a server: the public key of peers that may connect."""
    as_client: Curve | None = None
    """For a server: the keys with which it connects to servers of other hosts."""


class Refusal(Message, frozen=True, kw_only=True):
    """`error` is the name of a class in `manyhands.errors`."""

    error: str
    what: str
    where: str | None = None
    fix: list[str] = []


class StopRequest(Message, frozen=True, kw_only=True):
    kind: str


class Announce(Message, frozen=True, kw_only=True):
    """The newest generation, to a worker of an elastic run, and the public call that the run is in."""

    group: Group
    run_call: int = 0
    last_loss: str = ""
    """The latest generation that was formed because a worker was lost. A worker that skipped it must switch at once."""


class LiveWorkers(Message, frozen=True, kw_only=True):
    """To a server: the workers of all hosts that are not known to be dead."""

    workers: dict[int, int]
    """Slot by incarnation."""


class ServersWanted(Message, frozen=True, kw_only=True):
    """To workers and servers: how many servers there should be, and their endpoints as in `WorkerIdentity.servers`.

    Servers with higher numbers end when they are ready to.
    """

    number: int
    servers: str
    backups: list[str] = []
    """Endpoints where other hosts keep logs."""


class Appointed(Message, frozen=True, kw_only=True):
    """To a spare server: its number from now on, and where it listens, as in `WorkerIdentity.listen`."""

    server: int
    listen: str = ""


FromWorker = (
    WorkerHello
    | WorkerReport
    | Heartbeat
    | Offer
    | CommitNotice
    | Publish
    | Goodbye
    | PositionRequest
    | StoreRequest
    | MemoryRequest
)
ToWorker = (
    WorkerWelcome
    | Refusal
    | StopRequest
    | StoreReply
    | PositionReply
    | MemoryReply
    | Announce
    | LiveWorkers
    | ServersWanted
    | Appointed
)
