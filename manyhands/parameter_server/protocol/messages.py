"""Every message between workers and parameter servers. Each may be sent again: a repeated one is harmless.

On one host large data stays in shared memory and messages say where it is. Between hosts it travels in frames
(`frames.py`): `GradientPart` and `Bring` to a server, `FrameReply` from it, each with a checksum. The decoder refuses
unknown fields and types. `number` identifies the interval that a message belongs to; it grows, and servers ignore
messages of an earlier one.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from manyhands.comm.transport import Message
from manyhands.parallel.averaging.rounds import Quorum
from manyhands.parameter_server.protocol.leases import Interval, Item, Lease

__all__ = [
    "ApplyRows",
    "Bring",
    "Filled",
    "FrameReply",
    "FromServer",
    "FromWorker",
    "Got",
    "GradientPart",
    "Handed",
    "Lookup",
    "Number",
    "Of",
    "Open",
    "OpenRows",
    "Opened",
    "Refused",
    "Reply",
    "RowGradients",
    "RowsReply",
    "UpdateApplied",
    "UpdateDone",
    "Values",
    "Want",
    "Watermark",
    "WorkRequest",
]

Number = tuple[int, int, int]
"""The workers' generation that opened the interval, and how many intervals it had opened before."""


class _ServerMessage(Message, frozen=True, kw_only=True):
    number: Number


Of = Literal["weights", "states", "tables", "standing", "course"]
"""Weights with the buffers, optimizer state, embedding rows, what a server has committed, or the interval that it
serves."""

Values = list[tuple[int, float]]
"""Values that the user's code averages over workers, each with the number of rows it was computed from."""


class Open(_ServerMessage, frozen=True, kw_only=True, rename={"interval": "course"}):
    """Begin an interval: sent by the chief until every server has answered. Weights and states are in memory."""

    interval: Interval
    version: int
    """Of the weights and optimizer states at the beginning."""
    layout: str
    """Name of the memory for weights and gradients: another one when other parameters are trained."""
    trained: list[str]
    copies: int
    rows: int
    """How many versions of the weights (`copies`) and how many gradient buffers (`rows`) there are."""
    workers: list[int]
    """The workers of this interval; one that joins later waits for the next."""
    servers: int
    ahead: int | None
    """How many steps the weights of a slice may lack; None: any number, each step is applied on arrival."""
    backups: int
    """How many slices idle workers may compute a second time."""
    damping: bool
    groups: list[dict[str, Any]]
    """The optimizer's settings, by parameter group."""
    counts: list[int]
    """By parameter: how many steps its optimizer state has seen; 0: it has none."""
    more: bytes
    """States that are not in shared memory."""
    scheduler: dict[str, Any] | None
    scheduled: bool
    """The scheduler is stepped with every update."""
    states: list[str] = []
    """Names of the states with one element per element of their parameter."""
    away: list[int] = []
    """Workers that do not share the servers' memory."""
    brings: list[Of] = []
    """What is not in memory yet, and is sent in frames before the interval begins."""
    tables: list[int] = []
    """Embedding rows are sent, too: this many bytes to each server."""
    batches_per_step: int = 1
    """A step of the servers is a local-step range of this many batches, on which one worker trains alone."""
    alone: int = 0
    """Up to this step, one lease is granted at a time."""
    quorum: Quorum | None = None
    """Steps are applied in rounds, each with the gradients that have arrived; None: each step separately."""
    fresh: bool = False
    """The run begins with this interval: logs of an earlier run on disk are not replayed."""
    in_place: bool = False
    """There is one copy of the optimizer state, which updates change in place."""
    training: int = 1
    """Which of the script's trainings this is. A server that has not created it yet continues with the script."""
    seeds: dict[str, int] = {}
    """By table: the seed of new rows where it differs from this training's, as an earlier one had the model."""


class OpenRows(_ServerMessage, frozen=True, kw_only=True):
    """Serve embedding rows only, after this many steps: from the chief, to every server. The rows are in memory."""

    servers: int
    step: int
    base: int
    """Update number minus step number: the rows may come from a training with more steps."""
    training: int = 1
    seeds: dict[str, int] = {}
    """As in `Open`."""


class Opened(_ServerMessage, frozen=True, kw_only=True):
    server: int


class Refused(_ServerMessage, frozen=True, kw_only=True):
    """Reply to an `Open` that does not fit this server, on which it has no effect."""

    server: int
    why: str
    fix: list[str] = []
    """Not empty: it would fit if there were enough memory."""


class WorkRequest(_ServerMessage, frozen=True, kw_only=True):
    """A worker requests work from the first server."""

    worker: int
    book: int
    """Number of the last lease table that it knows; 0: none."""
    ticket: int
    met: int
    """The last step after which it has synchronised with the other workers."""
    told: int
    """How many of the run's updates it has been sent."""
    wish: int = 0
    """A request for a sync point; 0: none."""
    holding: list[Lease] = []
    values: Values = []
    soon: int = 0
    """How many of the slices after the next one it wants announced, to read the data ahead."""
    leaves: bool = False
    """It leaves this interval, and holds no lease."""


class UpdateDone(msgspec.Struct, frozen=True, array_like=True):
    """One update, as hooks and logs report it; in the order in which updates were applied."""

    update: int
    step: int
    loss: float
    rows: int
    lr: float
    staleness: int
    """How many updates its gradients had not seen, at most."""
    grad_norm: float | None
    together: int = 1
    """How many steps, each of another worker, its round combined."""


class Reply(_ServerMessage, frozen=True, kw_only=True):
    """Answer to a `WorkRequest`: a lease, or in `meet` the step after which all workers synchronise now."""

    ticket: int
    book: int
    version: int
    """All servers have applied the steps up to this one."""
    work: Lease | None = None
    meet: int | None = None
    why: int = 0
    done: list[UpdateDone] = []
    """Updates that the worker has not been sent yet. If there are many it is sent some, and asks again."""
    values: list[Values] = []
    """The latest values of the other workers."""
    soon: list[Item] = []
    """With a lease: items that this worker will probably be leased next."""
    save: bool = False
    """A server requests a checkpoint, so that its log has less to lose."""


class Handed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Gradients of embedding rows, in shared memory: see `row_gradient_handoff`."""

    table: str
    region: int
    """Length of the memory region that they are in."""
    at: int
    bounds: list[int]
    """Where each part's ids begin; the last entry is the end."""


class Filled(_ServerMessage, frozen=True, kw_only=True):
    """A gradient is complete in its buffer: from the worker to every server."""

    worker: int
    held: Lease
    based_on: int
    total: float
    weight: float
    absent: list[int] = []
    """Parameters that have no gradient."""
    pieces: int = 0
    """How many messages with gradients of embedding rows were sent to this server along with it."""
    handed: list[Handed] = []
    """Gradients of embedding rows that are in shared memory, for all servers."""
    tables: list[str] = []
    """Tables that it has gradients for, on any server: the age of their rows grows."""
    changes: bytes = b""
    """Buffers that the step's first slice changed, except batch statistics, which are with the gradient buffer."""


class Lookup(_ServerMessage, frozen=True, kw_only=True):
    """A worker requests rows of a table: unique ids, all of this server."""

    ticket: int
    table: str
    ids: bytes
    at_most: int | None = None
    """Return rows without updates beyond this one: a worker recomputes a step that this server has applied."""


class RowsReply(_ServerMessage, frozen=True, kw_only=True):
    ticket: int
    rows: bytes
    """In the order of the ids, each as long as the table's dimension."""
    version: int = 0
    """How many updates they have seen; 0 from servers that have embedding rows only."""


class RowGradients(_ServerMessage, frozen=True, kw_only=True):
    """Some of a leased slice's gradients for rows on this server; of a step's, on servers with embedding rows only."""

    filling: int
    order: int
    table: str
    ids: bytes
    gradients: bytes


class ApplyRows(_ServerMessage, frozen=True, kw_only=True):
    """All workers have committed a step: apply its gradients, which were sent in this many messages."""

    step: int
    pieces: int
    tables: list[str]
    """Those that the step has gradients for, on any server."""
    factor: float
    handed: list[tuple[int, Handed]] = []
    """Instead of messages: where each slice's gradients are in memory, in order, and with which gradient buffer."""


class GradientPart(_ServerMessage, frozen=True, kw_only=True):
    """Some of a gradient, to a server on another host, for the buffer that the lease names."""

    worker: int
    held: Lease
    offset: int
    crc: int
    data: bytes


class Bring(_ServerMessage, frozen=True, kw_only=True):
    """Some of the initial state of an interval, from a chief on another host."""

    offset: int
    crc: int
    data: bytes


class Got(_ServerMessage, frozen=True, kw_only=True):
    """Answer to a `GradientPart`, with its fill id, and with 0 to a `Bring` or to an `Open` that brings data."""

    server: int
    filling: int
    received: int
    """All bytes up to this one have arrived, or are no longer needed."""


class Want(_ServerMessage, frozen=True, kw_only=True):
    """A worker that does not share the servers' memory requests some of it."""

    ticket: int
    of: Of
    version: int | None
    """None: the newest."""
    offset: int


class FrameReply(_ServerMessage, frozen=True, kw_only=True):
    """Answer to a `Want`: one frame."""

    server: int
    ticket: int
    version: int
    is_there: bool
    """False: this version does not exist, or no longer does."""
    offset: int
    num_bytes: int
    """Of all frames of the stream together."""
    crc: int
    data: bytes


class UpdateApplied(_ServerMessage, frozen=True, kw_only=True):
    """A server has applied this step: sent to the worker whose gradient of it arrived."""

    server: int
    step: int


class Watermark(_ServerMessage, frozen=True, kw_only=True):
    """A server's progress, sent to the first server."""

    server: int
    low: int
    seen: list[int]
    has: list[tuple[int, int]]
    save: bool = False
    """As in `Reply`."""


FromWorker = (
    Open | OpenRows | WorkRequest | Filled | Lookup | RowGradients | ApplyRows | Watermark | GradientPart | Bring | Want
)
"""What a server accepts; progress reports come from other servers."""
FromServer = Opened | Refused | Reply | UpdateApplied | RowsReply | Got | FrameReply
