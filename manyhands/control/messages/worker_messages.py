"""Every message between a worker or server and its agent; between agents and coordinator: `agent_messages`.

Unknown fields and types are refused by the decoder, and everything that a worker says carries the generation and
incarnation it speaks for.
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
    "Committed",
    "FromWorker",
    "Goodbye",
    "Heartbeat",
    "Hello",
    "Living",
    "MemoryReply",
    "MemoryRequest",
    "Offer",
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
    "Value",
    "Welcome",
    "WhereIsEveryone",
    "WorkerPosition",
]


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of a message."""


class _FromMember(Message, frozen=True, kw_only=True):
    generation: str
    incarnation: int


class RunFacts(Value, frozen=True, kw_only=True):
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


class StoreReply(Message, frozen=True, kw_only=True):
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


class MemoryReply(Message, frozen=True, kw_only=True):
    ticket: int
    offset: int = 0
    error: str = ""
    fix: list[str] = []


class WorkerPosition(Value, frozen=True, kw_only=True):
    step: int
    phase: str
    age_s: float


class PositionReply(Message, frozen=True, kw_only=True):
    ticket: int
    positions: dict[int, WorkerPosition]


class Welcome(Message, frozen=True, kw_only=True):
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
    """The newest generation that began with a loss. A worker that missed it tells from this that it has to hurry."""


class Living(Message, frozen=True, kw_only=True):
    """To a server: the workers of all hosts that are alive, or not known to be dead."""

    workers: dict[int, int]
    """Their slots, by incarnation."""


class ServersWanted(Message, frozen=True, kw_only=True):
    """To workers and servers: how many servers there should be, and where as in a seat.

    Those with higher numbers end when they are ready.
    """

    number: int
    servers: str
    backups: list[str] = []
    """Where other hosts keep logs."""


class Appointed(Message, frozen=True, kw_only=True):
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
