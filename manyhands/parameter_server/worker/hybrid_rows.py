"""Rows within a step of replicas, where parameter servers have them: `mode="hybrid"`.

On the servers' host every rank puts its gradients for rows into memory that servers see, and tells the others where. If
some rank is elsewhere, or the sum's norm is wanted, each gets the sum instead, as without servers, and one sends each
server its share. Servers apply it under the step's number, once. A rank whose step fails does it again with the rows it
began with, so no server may be ahead of any rank: they hear of a step when all ranks have committed it, and nobody
looks rows up before all servers have it. What a rank owes to servers until then is part of its state. Between two steps
rows may go to another number of servers. Start reading at `ServedStep.settle`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
from torch import nn

from manyhands.comm.axis import Axis
from manyhands.embedding.replicated_rows import SparseStep
from manyhands.embedding.row_layer import Contribution
from manyhands.errors import PeerLost
from manyhands.parameter_server.memory.versioned_memory import Memory
from manyhands.parameter_server.protocol.messages import ApplyRows, Handed, Number, OpenRows, RowGradients
from manyhands.parameter_server.worker.row_lookup import ServedRows
from manyhands.parameter_server.worker.server_connection import Link

__all__ = ["ServedStep", "agreed_servers", "in_slices"]


class _Owed(NamedTuple):
    """What a committed step has for servers."""

    step: int
    contributions: list[Contribution]
    factor: float
    handed: list[tuple[int, Handed]]
    """In place of contributions: where each slice's lie, in their order, and beside which row."""

    @property
    def tables(self) -> list[str]:
        return list(dict.fromkeys([one.table for one in self.contributions] + [one.table for _, one in self.handed]))


class _Servers(msgspec.Struct, array_like=True):
    """What a rank says of servers before a step's rows are sent."""

    current: OpenRows
    proposed: OpenRows | None
    has_tried: bool
    agreed: OpenRows | None = None
    """What all went over to when somebody was lost. Some servers may have begun it, but no rank has."""
    is_void: bool = False
    """Some server of what was agreed is not there, and is not wanted any more."""


def agreed_servers(everyone: Sequence[_Servers]) -> OpenRows:
    """The newest, in which some ranks may be already.

    A proposal does not count while a share of the step may be on its way to servers of before: a part of a table that
    one of them is at would have two owners.
    """
    proposed = [one.proposed for one in everyone if one.proposed is not None]
    agreed = [one.agreed for one in everyone if one.agreed is not None]
    may_change = any(one.is_void for one in everyone) or not any(one.has_tried for one in everyone)
    known = [*(one.current for one in everyone), *agreed, *(proposed if may_change else [])]
    return max(known, key=lambda one: one.number)


def in_slices(ranks: Sequence[Sequence[tuple[int, Handed]]]) -> list[tuple[int, Handed]]:
    """What each rank has said of its slices, in the order of slices: beside which row, which is its rank, and where."""
    ones = [(place, rank, where) for rank, told in enumerate(ranks) for place, where in told]
    return [(rank, where) for _, rank, where in sorted(ones, key=lambda one: one[0])]


class ServedStep(SparseStep):
    """Promises: whoever dies, every step counts once in every row, and its lookups see all steps before and no other.

    Costs: what `SparseStep` does, and for every step a message to each server, which all ranks wait for.
    """

    are_here = False

    def __init__(
        self,
        model: nn.Module,
        seed: int,
        link: Link,
        memory: Memory | None,
        *,
        shares: bool,
        num_servers: Callable[[], int],
        are_up: Callable[[int], bool],
        next_number: Callable[[], Number],
        entered: Callable[[Number], None],
        wait_for_chief: Callable[[str], None],
        training: int = 1,
        needs_norm: bool = False,
    ) -> None:
        """`shares`: the memory is the servers'. `num_servers` says how many there should be, `are_up` whether so many
        are there. `next_number` is above that of every course of any training that ranks have `entered`.
        `needs_norm`: every rank wants the sum of gradients.
        """
        super().__init__(model, seed)
        self._served, self._link = ServedRows(model, seed, link, memory, shares=shares), link
        self._num_servers, self._are_up = num_servers, are_up
        self._next_number, self._entered, self._wait_for_chief = next_number, entered, wait_for_chief
        self._training, self._needs_norm = training, needs_norm
        self._handed: list[tuple[int, Handed]] = []
        self._opening: OpenRows | None = None
        self._owed: _Owed | None = None
        self._has_tried = False
        """A share of the step that is owed may be on its way to a server."""
        self._agreed: OpenRows | None = None
        self._is_void = False
        self._tells_peers = False

    @property
    def is_open(self) -> bool:
        """Whether servers have the rows; else this rank does: those that it began with, or was given since."""
        return self._opening is not None and not self._served.is_new

    def open(self, axis: Axis, step: int) -> None:
        """After so many steps, have servers take over the rows of rank 0. By all ranks together, and repeatable."""
        told = axis.all_gather_bytes("rows on servers", msgspec.msgpack.encode(self._opening if self.is_open else None))
        known = [one for data in told if (one := msgspec.msgpack.decode(data, type=OpenRows | None)) is not None]
        if known:  # a rank was lost when some had it done already
            self._enter(max(known, key=lambda one: one.number))
            return
        proposed = b""
        if axis.rank == 0:
            proposed = msgspec.msgpack.encode(self._propose(step, self._served.updates_beyond(step)))
        opening = msgspec.msgpack.decode(axis.all_gather_bytes("servers of rows", proposed)[0], type=OpenRows)
        if axis.rank == 0:
            self._served.install(opening.step + opening.base)
            self._have_opened(opening)
        self._wait_for_chief(f"rows {opening.number}")
        self._enter(opening)

    def _have_opened(self, opening: OpenRows) -> None:
        """By all of its servers; if fewer are wanted meanwhile, who leaves before it hears of it never answers."""
        try:
            self._link.open(opening, lambda: self._num_servers() >= opening.servers or self._are_up(opening.servers))
        except PeerLost:
            self._is_void = True
            raise

    def _propose(self, step: int, base: int) -> OpenRows:
        return OpenRows(
            number=self._next_number(),
            servers=self._num_servers(),
            step=step,
            base=base,
            training=self._training,
            seeds=self.sparse.seeds,
        )

    def _enter(self, opening: OpenRows) -> None:
        self._entered(opening.number)
        self._opening, self._agreed, self._is_void = opening, None, False
        self._link.follow(opening)
        self._served.enter(opening.number, opening.servers)
        self._served.tells = True

    # ---- steps ----

    def exchange(self, axis: Axis, number: int) -> None:
        """Have all ranks know where the step's gradients are, or what they are."""
        self._handed = []
        if self and not self._needs_norm:
            mine = self._served.hand_step(axis.rank, number, self._mine)
            told = axis.all_gather_bytes(f"rows of step {number} in memory", msgspec.msgpack.encode(mine))
            found = [msgspec.msgpack.decode(one, type=list[tuple[int, Handed]] | None) for one in told]
            everyone = [one for one in found if one is not None]
            if len(everyone) == axis.size:
                self._handed = in_slices(everyone)
                return
        super().exchange(axis, number)

    def apply(self, number: int) -> None:
        """The step is committed here. Servers hear of it in `settle`."""
        self._owed = _Owed(number, self._summed, self.factor, self._handed)
        self._mine, self._summed, self._handed = {}, [], []

    def settle(self, axis: Axis) -> None:
        """Have servers apply the step that all ranks are to have committed. By all ranks together, and repeatable."""
        self._agree_on_servers(axis)
        if self._owed is not None:
            self._send(self._owed, axis)
        axis.barrier("rows on servers")
        self._owed, self._has_tried = None, False

    def _agree_on_servers(self, axis: Axis) -> None:
        """The step is taken by all; and it goes to other servers than the last one, if rank 0 thinks that it should."""
        assert self._opening is not None
        proposed = self._rescaled() if axis.rank == 0 else None
        mine = _Servers(self._opening, proposed, self._has_tried, self._agreed, self._is_void)
        self._has_tried = True  # from here on: who hears all may send, and be the only one to know of it
        told = axis.all_gather_bytes("step taken by all", msgspec.msgpack.encode(mine))
        everyone = [msgspec.msgpack.decode(data, type=_Servers) for data in told]
        opening = agreed_servers(everyone)
        if all(one.current.number == opening.number for one in everyone):
            return
        self._agreed, self._is_void = opening, False
        axis.barrier("other servers of rows")  # none of them has heard of what some rank does not know
        if axis.rank == 0:
            self._have_opened(opening)
        self._wait_for_chief(f"rows {opening.number}")
        self._enter(opening)

    def _rescaled(self) -> OpenRows | None:
        """Another number of servers is wanted, and all of them are there: what to tell them. Nothing is copied."""
        assert self._opening is not None
        wanted = self._num_servers()
        if self._owed is None:
            return None
        if not self._is_void and (wanted == self._opening.servers or not self._are_up(wanted)):
            return None
        return self._propose(self._owed.step - 1, self._opening.base)

    def _send(self, owed: _Owed, axis: Axis) -> None:
        """This rank's share of the sending: to every server one rank does it."""
        nothing: list[list[RowGradients]] = [[] for _ in range(self._servers_now)]
        shares = nothing if owed.handed else self._served.messages(owed.step, owed.contributions)
        mine: dict[int, list[RowGradients | ApplyRows]] = {
            server: [*pieces, self._order(owed, pieces)]
            for server, pieces in enumerate(shares)
            if server % axis.size == axis.rank
        }
        self._link.apply_rows(owed.step, mine)

    def _order(self, owed: _Owed, pieces: list[RowGradients]) -> ApplyRows:
        assert self._opening is not None
        return ApplyRows(
            number=self._opening.number,
            step=owed.step,
            pieces=len(pieces),
            tables=owed.tables,
            factor=owed.factor,
            handed=owed.handed,
        )

    @property
    def _servers_now(self) -> int:
        assert self._opening is not None
        return self._opening.servers

    # ---- ranks that come, and what they are told ----

    def synchronise(self, axis: Axis) -> None:
        """Give every rank rank 0's rows, unless servers have them."""
        told = axis.all_gather_bytes("who has the rows", b"servers" if self.is_open else b"")[0]
        if told:
            self._served.is_new = False
        else:
            super().synchronise(axis)

    @contextmanager
    def telling_peers(self) -> Iterator[None]:
        """Inside, `state` and the model's own leave out what servers have."""
        self._tells_peers = self.is_open
        try:
            if not self.is_open:
                yield
                return
            with self.sparse.hidden():
                yield
        finally:
            self._tells_peers = False

    def state(self) -> dict[str, Any]:
        """For ranks that come: where the rows are, and what servers have not got yet. For a checkpoint: nothing."""
        if not self._tells_peers:
            return {}
        assert self._opening is not None
        owed = self._owed and [
            *(self._owed.step, [list(one) for one in self._owed.contributions], self._owed.factor),
            msgspec.to_builtins(self._owed.handed),
        ]
        return {"opening": msgspec.to_builtins(self._opening), "owed": owed}

    def restore(self, state: dict[str, Any]) -> None:
        """After the model's own state."""
        self._owed = None
        if not state:
            return
        self._enter(msgspec.convert(state["opening"], OpenRows))
        if state["owed"] is not None:
            step, contributions, factor, handed = state["owed"]
            where = msgspec.convert(handed, list[tuple[int, Handed]])
            self._owed = _Owed(step, [Contribution(*one) for one in contributions], factor, where)

    # ---- other trainings ----

    def put_down(self) -> None:
        """Servers go on to another training: have the rows that they have in this process."""
        assert self._owed is None, "servers lack a step that is committed"
        if self:
            self._served.leave()
        self._opening = None
        self._link.reach(0)

    def take_up(self) -> None:
        """The rows that layers have by now go to servers when the next steps begin."""
        if self:
            self._served.adopt()

    def close(self) -> None:
        self._link.close()
