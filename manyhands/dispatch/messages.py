"""Every message between a cluster, its workers and its variable servers. Tensors follow as separate frames.

Unknown fields and types are refused by the decoder. The sender of a message is identified by its connection.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from manyhands.comm.transport import Message
from manyhands.dispatch.variable_ledger import Change

__all__ = [
    "Alive",
    "Apply",
    "CallDone",
    "CallFailed",
    "CannotFinish",
    "CommitApplied",
    "FromMember",
    "HubWelcome",
    "Leaving",
    "Map",
    "NotReady",
    "Read",
    "ReadReply",
    "RunCall",
    "ServerHello",
    "ServerWelcome",
    "Stop",
    "ToServer",
    "ToWorker",
    "VariableLocation",
    "WorkerReady",
]


# ---- a worker and the cluster ----------------------------------------------------------------------------------


class WorkerReady(Message, frozen=True, kw_only=True):
    """A worker is ready. `number` is -1 if the cluster did not start it."""

    number: int
    pid: int
    host: str


class NotReady(Message, frozen=True, kw_only=True):
    """From a child that ends with an exception, for example because its module of steps cannot be imported."""

    role: Literal["worker", "server"]
    number: int
    what: str


class Alive(Message, frozen=True, kw_only=True):
    """Heartbeat over a worker's second connection, and its reply. `worker` is the identity of its main connection."""

    worker: bytes
    known: bool = True


class Leaving(Message, frozen=True, kw_only=True):
    """Last message of a worker that accepts no further calls."""


class HubWelcome(Message, frozen=True, kw_only=True):
    number: int
    seed: int
    silent_s: float


class Map(Message, frozen=True, kw_only=True):
    """Locations of variables; sent before the first call that may need them."""

    servers: dict[int, str]
    """Server addresses by number."""
    places: dict[str, int]
    """Server number of each variable, by name."""


class RunCall(Message, frozen=True, kw_only=True):
    """A call; its arguments follow."""

    call: int
    attempt: int
    step: str
    snapshot: int
    marks: dict[int, int]
    """By server: the last commit up to the snapshot that changes its variables."""


class CallDone(Message, frozen=True, kw_only=True):
    """The result follows in `value_frames` frames, then one frame for each change."""

    call: int
    attempt: int
    value_frames: int
    changes: list[Change]


class CallFailed(Message, frozen=True, kw_only=True):
    call: int
    attempt: int
    error: str
    message: str
    traceback: str


class CannotFinish(Message, frozen=True, kw_only=True):
    """The call's snapshot was lost with a server that died: the call has to start again."""

    call: int
    attempt: int


class Stop(Message, frozen=True, kw_only=True):
    pass


# ---- a server and the cluster ----------------------------------------------------------------------------------


class VariableLocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Location of a variable in the shared memory that the cluster holds."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int


class ServerHello(Message, frozen=True, kw_only=True):
    server: int
    pid: int
    addresses: dict[str, str]
    """Addresses for workers to read from: "ipc" on this host, and "tcp" if the cluster listens."""


class ServerWelcome(Message, frozen=True, kw_only=True):
    applied: int
    kept: list[VariableLocation]


class Apply(Message, frozen=True, kw_only=True):
    """One commit; one frame for each change follows. No call will read snapshots before `oldest`."""

    commit: int
    oldest: int
    changes: list[Change]
    kept: list[VariableLocation]
    """Locations of the variables that it changes; those unknown to the server are new."""


class CommitApplied(Message, frozen=True, kw_only=True):
    """This commit and all before it are in shared memory, which outlives the server."""

    commit: int


# ---- a reader and a server -------------------------------------------------------------------------------------


class Read(Message, frozen=True, kw_only=True):
    ticket: int
    name: str
    snapshot: int
    after: int
    """The server answers once it has applied this commit."""


class ReadReply(Message, frozen=True, kw_only=True):
    """The variable's bytes follow, if it was found."""

    ticket: int
    found: Literal["there", "absent", "gone"]
    shape: tuple[int, ...] = ()
    dtype: str = ""


FromMember = (
    WorkerReady
    | NotReady
    | Alive
    | Leaving
    | CallDone
    | CallFailed
    | CannotFinish
    | ServerHello
    | CommitApplied
    | ReadReply
)
ToWorker = HubWelcome | Alive | Map | RunCall | Stop
ToServer = ServerWelcome | Apply | Read | Stop
