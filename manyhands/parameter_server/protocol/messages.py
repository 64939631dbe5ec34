"""Every message between workers and parameter servers. Each can be sent again: a repeated one is harmless.

On one host what is large stays in shared memory, where gradients and weights are; messages say where. Between hosts it
travels in frames (`frames.py`): `Piece` and `Bring` to a server, `Part` from it, each with a checksum. Unknown
fields and types are refused by the decoder. `number` is that of the course which a message belongs to; it grows, and
servers ignore those of an earlier one.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from manyhands.comm.transport import Message
from manyhands.parallel.averaging.rounds import Quorum
from manyhands.parameter_server.protocol.interval import Course
from manyhands.parameter_server.protocol.leases import Held, Item

__all__ = [
    "Applied",
    "ApplyRows",
    "Ask",
    "Bring",
    "Done",
    "Filled",
    "FromServer",
    "FromWorker",
    "Got",
    "Handed",
    "Lookup",
    "Number",
    "Of",
    "Open",
    "OpenRows",
    "Opened",
    "Part",
    "Piece",
    "Refused",
    "Reply",
    "RowGradients",
    "Rows",
    "Stand",
    "Values",
    "Want",
]

Number = tuple[int, int, int]
"""The generation of workers that opened the course, and how many it had opened before."""


class _Message(Message, frozen=True, kw_only=True):
    number: Number


Of = Literal["weights", "states", "tables", "standing", "course"]
"""Weights with the buffers, the optimizer's states, rows of embeddings, what a server has committed, or the course that
it was told of."""

Values = list[tuple[int, float]]
"""What a worker's own code takes means of: values, each with the rows that it is of."""


class Open(_Message, frozen=True, kw_only=True):
    """A course begins: from the chief, to every server, until each has answered. Weights and states are in place."""

    course: Course
    version: int
    """Of the weights and states that it begins with."""
    layout: str
    """What the memory of weights and gradients is called: another one when other parameters are trained."""
    trained: list[str]
    copies: int
    rows: int
    """How many versions of the weights, and how many gradients, there is memory for."""
    workers: list[int]
    """Who takes part in it; whoever comes later waits for the next."""
    servers: int
    ahead: int | None
    """How many steps a slice's weights may lack; None: any number, each step is applied as it comes."""
    backups: int
    """How many slices idle workers may compute a second time."""
    damping: bool
    groups: list[dict[str, Any]]
    """The optimizer's settings, by group of parameters."""
    counts: list[int]
    """By parameter: how many steps its states have seen; 0: it has none."""
    more: bytes
    """States that do not lie in memory."""
    scheduler: dict[str, Any] | None
    scheduled: bool
    """The scheduler takes a step with every update."""
    states: list[str] = []
    """States as long as the parameters, by name."""
    away: list[int] = []
    """Workers that do not share the servers' memory."""
    brings: list[Of] = []
    """What is not in place yet, and comes in frames before the course begins."""
    tables: list[int] = []
    """Rows of embeddings come, too: in so many bytes for each server."""
    batches_per_step: int = 1
    """What servers take for a step is a stretch of so many batches, on which a worker trained by itself."""
    alone: int = 0
    """To this step, one is handed out at a time."""
    quorum: Quorum | None = None
    """Steps are applied in rounds, each with whoever has come; None: each by itself."""
    fresh: bool = False
    """The run begins with this course: what is on disk of an earlier one does not count."""
    in_place: bool = False
    """There is one copy of the states, which updates change."""
    training: int = 1
    """Which of the script's trainings it belongs to. A server that has not made it yet goes on with the script."""
    seeds: dict[str, int] = {}
    """By table: what new rows begin with, where that is not this training's seed: an earlier one had the model."""


class OpenRows(_Message, frozen=True, kw_only=True):
    """Rows alone are served, after so many steps: from the chief, to every server. They are in place."""

    servers: int
    step: int
    base: int
    """What a step's number is short of the number of its update: rows may come from a training of more steps."""
    training: int = 1
    seeds: dict[str, int] = {}
    """As in an Open."""


class Opened(_Message, frozen=True, kw_only=True):
    server: int


class Refused(_Message, frozen=True, kw_only=True):
    """To an Open that does not fit this server: it changes nothing here."""

    server: int
    why: str
    fix: list[str] = []
    """With one: it would fit, if there were memory for it."""


class Ask(_Message, frozen=True, kw_only=True):
    """A worker wants work, from the first server."""

    worker: int
    book: int
    """The number of the book that it heard of last; 0: of none."""
    ticket: int
    met: int
    """The last step after which it has met the others."""
    told: int
    """How many updates of the run it knows of."""
    wish: int = 0
    holding: list[Held] = []
    values: Values = []
    soon: int = 0
    """How many slices after the next one it wants to know of, to read them ahead."""
    leaves: bool = False
    """It takes no further part in this course, and holds nothing."""


class Done(msgspec.Struct, frozen=True, array_like=True):
    """One update, as watchers see it; in the order in which updates were applied."""

    update: int
    step: int
    loss: float
    rows: int
    lr: float
    staleness: int
    """How many updates its gradients had not seen, at most."""
    grad_norm: float | None
    together: int = 1
    """Of how many steps, of as many workers, its round was made."""


class Reply(_Message, frozen=True, kw_only=True):
    """To an Ask: work, or with `meet` the step after which all meet now."""

    ticket: int
    book: int
    version: int
    """All servers have applied the steps to this one."""
    work: Held | None = None
    meet: int | None = None
    why: int = 0
    done: list[Done] = []
    """Updates that the worker did not know of. If there are many, it is sent some, and asks again."""
    values: list[Values] = []
    """What other workers have told last."""
    soon: list[Item] = []
    """With work: steps and places that will probably be leased to this worker next."""
    save: bool = False
    """Some server's log would have less to lose if there was a checkpoint."""


class Handed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Gradients of a table's rows, in shared memory: see `row_gradient_handoff`."""

    table: str
    region: int
    """How long the region is that they are in."""
    at: int
    bounds: list[int]
    """Where each part's ids begin; behind the last, the end."""


class Filled(_Message, frozen=True, kw_only=True):
    """A gradient is in its row; to every server."""

    worker: int
    held: Held
    based_on: int
    total: float
    weight: float
    absent: list[int] = []
    """Parameters without a gradient in it."""
    pieces: int = 0
    """How many messages with gradients of rows this server was sent beside it."""
    handed: list[Handed] = []
    """Gradients of rows that lie in memory, for all servers."""
    tables: list[str] = []
    """Tables that it has gradients for, this server's or others': their rows grow older."""
    changes: bytes = b""
    """What the step's first slice made of buffers other than batch statistics, which lie beside the row."""


class Lookup(_Message, frozen=True, kw_only=True):
    """A worker wants rows of a table; ids are different, and this server's."""

    ticket: int
    table: str
    ids: bytes
    at_most: int | None = None
    """Rows are to have seen no update beyond this one: somebody computes a step again that this server has."""


class Rows(_Message, frozen=True, kw_only=True):
    ticket: int
    rows: bytes
    """In the order of the ids, each as long as the table's dimension."""
    version: int = 0
    """How many updates they have seen; where servers have rows alone, that is not told."""


class RowGradients(_Message, frozen=True, kw_only=True):
    """Some of what a leased slice has for a table's rows that are this server's; or a step, where rows alone are."""

    filling: int
    order: int
    table: str
    ids: bytes
    gradients: bytes


class ApplyRows(_Message, frozen=True, kw_only=True):
    """A step is committed by all workers: apply what was sent of it, in so many pieces."""

    step: int
    pieces: int
    tables: list[str]
    """Those that the step has gradients for, this server's or others'."""
    factor: float
    handed: list[tuple[int, Handed]] = []
    """In place of pieces: where each slice's gradients lie in memory, in their order, and beside which row."""


class Piece(_Message, frozen=True, kw_only=True):
    """Some of a gradient, to a server of another host, for the row that the lease names."""

    worker: int
    held: Held
    offset: int
    crc: int
    data: bytes


class Bring(_Message, frozen=True, kw_only=True):
    """Some of what a course begins with, from a chief on another host."""

    offset: int
    crc: int
    data: bytes


class Got(_Message, frozen=True, kw_only=True):
    """To a Piece, with its filling, or to an Open that brings something and to a Bring, with filling 0."""

    server: int
    filling: int
    received: int
    """All bytes to this one are there, or are not wanted any more."""


class Want(_Message, frozen=True, kw_only=True):
    """A worker without the servers' memory asks for some of it."""

    ticket: int
    of: Of
    version: int | None
    """None: the newest."""
    offset: int


class Part(_Message, frozen=True, kw_only=True):
    """To a Want: a frame."""

    server: int
    ticket: int
    version: int
    is_there: bool
    """False: this version is not there, or not any more."""
    offset: int
    num_bytes: int
    """Of all frames together."""
    crc: int
    data: bytes


class Applied(_Message, frozen=True, kw_only=True):
    """To whoever sent a gradient of a step that is applied: a server has it."""

    server: int
    step: int


class Stand(_Message, frozen=True, kw_only=True):
    """Where a server stands, to the first one."""

    server: int
    low: int
    seen: list[int]
    has: list[tuple[int, int]]
    save: bool = False
    """As in a reply."""


FromWorker = Open | OpenRows | Ask | Filled | Lookup | RowGradients | ApplyRows | Stand | Piece | Bring | Want
"""What a server accepts: Stand comes from other servers."""
FromServer = Opened | Refused | Reply | Applied | Rows | Got | Part
