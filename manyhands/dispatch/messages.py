"""Every message between a cluster, its workers and its variable servers. Tensors follow as frames of their own.

Unknown fields and types are refused by the decoder. Who sent a message is known by its connection.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from manyhands.comm.transport import Message
from manyhands.dispatch.variable_ledger import Change

__all__ = [
    "Alive",
    "Applied",
    "Apply",
    "CallDone",
    "CallFailed",
    "CannotFinish",
    "FromMember",
    "Hello",
    "Kept",
    "Leaving",
    "Map",
    "NotReady",
    "Read",
    "Run",
    "ServerHello",
    "ServerWelcome",
    "Stop",
    "ToServer",
    "ToWorker",
    "Value",
    "Welcome",
]


# ---- a worker and the cluster ----------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    """A worker is ready. `number` is -1 where the cluster did not start it."""

    number: int
    pid: int
    host: str


class NotReady(Message, frozen=True, kw_only=True):
    """From a child that ends with an exception, such as one whose module of steps cannot be imported."""

    role: Literal["worker", "server"]
    number: int
    what: str


class Alive(Message, frozen=True, kw_only=True):
    """From a worker's second connection, and back: both ends are there. `worker` is its first one's identity."""

    worker: bytes
    known: bool = True


class Leaving(Message, frozen=True, kw_only=True):
    """From a worker that takes no further call, after all that it has to say."""


class Welcome(Message, frozen=True, kw_only=True):
    number: int
    seed: int
    silent_s: float


class Map(Message, frozen=True, kw_only=True):
    """Where variables are; before the first call that may need to know."""

    servers: dict[int, str]
    """Addresses by number."""
    places: dict[str, int]
    """Variables by name: the number of their server."""


class Run(Message, frozen=True, kw_only=True):
    """A call; its arguments follow."""

    call: int
    attempt: int
    step: str
    snapshot: int
    marks: dict[int, int]
    """By server: the last commit up to the snapshot that concerns it."""


class CallDone(Message, frozen=True, kw_only=True):
    """The result follows, in `value_frames` frames, then one frame for each change."""

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
    """What the call was to see is gone, with a server that died: it has to begin again."""

    call: int
    attempt: int


class Stop(Message, frozen=True, kw_only=True):
    pass


# ---- a server and the cluster ----------------------------------------------------------------------------------


class Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a variable lies in the memory that the cluster holds."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int


class ServerHello(Message, frozen=True, kw_only=True):
    server: int
    pid: int
    addresses: dict[str, str]
    """Where workers read: "ipc" for this host, and "tcp" where the cluster listens."""


class ServerWelcome(Message, frozen=True, kw_only=True):
    applied: int
    kept: list[Kept]


class Apply(Message, frozen=True, kw_only=True):
    """One commit; one frame for each change follows. Nobody will read what was before `oldest`."""

    commit: int
    oldest: int
    changes: list[Change]
    kept: list[Kept]
    """Where the variables lie that it changes; those that it does not know are new."""


class Applied(Message, frozen=True, kw_only=True):
    """This commit and all before it are in the memory that outlives the server."""

    commit: int


# ---- whoever reads, and a server -------------------------------------------------------------------------------


class Read(Message, frozen=True, kw_only=True):
    ticket: int
    name: str
    snapshot: int
    after: int
    """To be answered once the server has applied this commit."""


class Value(Message, frozen=True, kw_only=True):
    """Its bytes follow, if it is there."""

    ticket: int
    found: Literal["there", "absent", "gone"]
    shape: tuple[int, ...] = ()
    dtype: str = ""


FromMember = Hello | NotReady | Alive | Leaving | CallDone | CallFailed | CannotFinish | ServerHello | Applied | Value
ToWorker = Welcome | Alive | Map | Run | Stop
ToServer = ServerWelcome | Apply | Read | Stop
