"""Embedding rows on parameter servers, in steps of replicas: `mode="hybrid"`.

On the servers' host every rank writes its gradients for rows to memory that servers read, and sends their location to
the other ranks. If a rank is on another host, or the norm of the sum is needed, every rank gets the sum instead, as
without servers, and one rank sends each server its share. Servers apply it under the step's number, once. A rank whose
step fails repeats it with the rows that it began with, so no server may be ahead of any rank: servers are sent a step
when all ranks have committed it, and no rank looks rows up before all servers have applied it. Until then the pending
gradients are part of a rank's state. Between two steps the rows may move to another number of servers. Start reading
at `HybridStep.settle`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
from torch import nn

from manyhands.comm.axis import Axis
from manyhands.comm.host_memory import Memory
from manyhands.embedding.replicated_rows import SparseStep
from manyhands.embedding.row_layer import TableGradient
from manyhands.errors import PeerLost
from manyhands.parameter_server.protocol.messages import ApplyRows, Handed, Number, OpenRows, RowGradients
from manyhands.parameter_server.worker.row_lookup import ServedRows
from manyhands.parameter_server.worker.server_connection import ServerConnection

__all__ = ["HybridStep", "agreed_servers", "in_slices"]


class _PendingRows(NamedTuple):
    """A committed step's gradients for servers."""

    step: int
    contributions: list[TableGradient]
    factor: float
    handed: list[tuple[int, Handed]]
    """Instead of contributions: where each slice's gradients are, in order, and in which rank's buffer."""

    @property
    def tables(self) -> list[str]:
        return list(dict.fromkeys([one.table for one in self.contributions] + [one.table for _, one in self.handed]))


class _Servers(msgspec.Struct, array_like=True):
    """A rank's view of the servers, before a step's gradients are sent."""

    current: OpenRows
    proposed: OpenRows | None
    has_tried: bool
    agreed: OpenRows | None = None
    """What all ranks had agreed on when one was lost. Some servers may have begun it, but no rank has."""
    is_void: bool = False
    """A server of what was agreed is not running, and is no longer wanted."""


def agreed_servers(everyone: Sequence[_Servers]) -> OpenRows:
    """The newest opening, which some ranks may have entered already.

    A proposal does not count while part of the step may be on its way to the previous servers: a part of a table that
    one of them is updating would have two owners.
    """
    proposed = [one.proposed for one in everyone if one.proposed is not None]
    agreed = [one.agreed for one in everyone if one.agreed is not None]
    may_change = any(one.is_void for one in everyone) or not any(one.has_tried for one in everyone)
    known = [*(one.current for one in everyone), *agreed, *(proposed if may_change else [])]
    return max(known, key=lambda one: one.number)


def in_slices(ranks: Sequence[Sequence[tuple[int, Handed]]]) -> list[tuple[int, Handed]]:
    """The ranks' reports on their slices, in the order of slices: in which rank's buffer, and where."""
    ones = [(slice_index, rank, where) for rank, report in enumerate(ranks) for slice_index, where in report]
    return [(rank, where) for _, rank, where in sorted(ones, key=lambda one: one[0])]


class HybridStep(SparseStep):
    """Promises: even if processes die, every step counts once in every row; its lookups see exactly the steps before.

    Costs: those of `SparseStep`, and for every step a message to each server, which all ranks wait for.
    """

    are_here = False

    def __init__(
        self,
        model: nn.Module,
        seed: int,
        link: ServerConnection,
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
        """`shares`: the memory is the servers'. `num_servers` returns how many there should be, `are_up` whether this
        many are running. `next_number` is above that of every interval of any training that ranks have `entered`.
        `needs_norm`: every rank needs the sum of gradients.
        """
        super().__init__(model, seed)
        self._served, self._link = ServedRows(model, seed, link, memory, shares=shares), link
        self._num_servers, self._are_up = num_servers, are_up
        self._next_number, self._entered, self._wait_for_chief = next_number, entered, wait_for_chief
        self._training, self._needs_norm = training, needs_norm
        self._handed: list[tuple[int, Handed]] = []
        self._opening: OpenRows | None = None
        self._pending: _PendingRows | None = None
        self._has_tried = False
        """Part of the pending step may be on its way to a server."""
        self._agreed: OpenRows | None = None
        self._is_void = False
        self._is_for_peers = False

    @property
    def is_open(self) -> bool:
        """Whether servers have the rows; else this rank does: those that it began with, or received since."""
        return self._opening is not None and not self._served.is_new

    def open(self, axis: Axis, step: int) -> None:
        """After `step` steps, hand the rows of rank 0 to the servers. Called by all ranks together; repeatable."""
        gathered = axis.all_gather_bytes(
            "rows on servers", msgspec.msgpack.encode(self._opening if self.is_open else None)
        )
        known = [one for data in gathered if (one := msgspec.msgpack.decode(data, type=OpenRows | None)) is not None]
        if known:  # a rank was lost when others had opened already
            self._enter(max(known, key=lambda one: one.number))
            return
        proposed = b""
        if axis.rank == 0:
            proposed = msgspec.msgpack.encode(self._propose(step, self._served.updates_beyond(step)))
        opening = msgspec.msgpack.decode(axis.all_gather_bytes("servers of rows", proposed)[0], type=OpenRows)
        if axis.rank == 0:
            self._served.install(opening.step + opening.base)
            self._open_on_servers(opening)
        self._wait_for_chief(f"rows {opening.number}")
        self._enter(opening)

    def _open_on_servers(self, opening: OpenRows) -> None:
        """On all of its servers; if fewer are wanted meanwhile, one that leaves before that never answers."""
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
        """Send every rank the location of the step's gradients, or the gradients."""
        self._handed = []
        if self and not self._needs_norm:
            mine = self._served.hand_step(axis.rank, number, self._mine)
            gathered = axis.all_gather_bytes(f"rows of step {number} in memory", msgspec.msgpack.encode(mine))
            found = [msgspec.msgpack.decode(one, type=list[tuple[int, Handed]] | None) for one in gathered]
            everyone = [one for one in found if one is not None]
            if len(everyone) == axis.size:
                self._handed = in_slices(everyone)
                return
        super().exchange(axis, number)

    def apply(self, number: int) -> None:
        """The step is committed on this rank. Servers are sent it in `settle`."""
        self._pending = _PendingRows(number, self._summed, self.factor, self._handed)
        self._mine, self._summed, self._handed = {}, [], []

    def settle(self, axis: Axis) -> None:
        """Have servers apply the step that all ranks have committed. Called by all ranks together; repeatable."""
        self._agree_on_servers(axis)
        if self._pending is not None:
            self._send(self._pending, axis)
        axis.barrier("rows on servers")
        self._pending, self._has_tried = None, False

    def _agree_on_servers(self, axis: Axis) -> None:
        """All ranks have the step; it goes to other servers than the last one if rank 0 proposes that."""
        assert self._opening is not None
        proposed = self._propose_rescale() if axis.rank == 0 else None
        mine = _Servers(self._opening, proposed, self._has_tried, self._agreed, self._is_void)
        self._has_tried = True  # from here on: a rank that receives all may send, and be the only one that knows
        gathered = axis.all_gather_bytes("step taken by all", msgspec.msgpack.encode(mine))
        everyone = [msgspec.msgpack.decode(data, type=_Servers) for data in gathered]
        opening = agreed_servers(everyone)
        if all(one.current.number == opening.number for one in everyone):
            return
        self._agreed, self._is_void = opening, False
        axis.barrier("other servers of rows")  # no server has received what a rank does not know
        if axis.rank == 0:
            self._open_on_servers(opening)
        self._wait_for_chief(f"rows {opening.number}")
        self._enter(opening)

    def _propose_rescale(self) -> OpenRows | None:
        """If another number of servers is wanted and all of them are running: what to send them. Nothing is copied."""
        assert self._opening is not None
        wanted = self._num_servers()
        if self._pending is None:
            return None
        if not self._is_void and (wanted == self._opening.servers or not self._are_up(wanted)):
            return None
        return self._propose(self._pending.step - 1, self._opening.base)

    def _send(self, pending: _PendingRows, axis: Axis) -> None:
        """This rank's part of the sending: each server is sent to by one rank."""
        nothing: list[list[RowGradients]] = [[] for _ in range(self._servers_now)]
        shares = nothing if pending.handed else self._served.messages(pending.step, pending.contributions)
        mine: dict[int, list[RowGradients | ApplyRows]] = {
            server: [*pieces, self._apply_message(pending, pieces)]
            for server, pieces in enumerate(shares)
            if server % axis.size == axis.rank
        }
        self._link.apply_rows(pending.step, mine)

    def _apply_message(self, pending: _PendingRows, pieces: list[RowGradients]) -> ApplyRows:
        assert self._opening is not None
        return ApplyRows(
            number=self._opening.number,
            step=pending.step,
            pieces=len(pieces),
            tables=pending.tables,
            factor=pending.factor,
            handed=pending.handed,
        )

    @property
    def _servers_now(self) -> int:
        assert self._opening is not None
        return self._opening.servers

    # ---- ranks that join, and what they receive ----

    def synchronise(self, axis: Axis) -> None:
        """Give every rank the rows of rank 0, unless servers have them."""
        gathered = axis.all_gather_bytes("who has the rows", b"servers" if self.is_open else b"")[0]
        if gathered:
            self._served.is_new = False
        else:
            super().synchronise(axis)

    @contextmanager
    def telling_peers(self) -> Iterator[None]:
        """Inside, `state` and the model's state leave out what servers have."""
        self._is_for_peers = self.is_open
        try:
            if not self.is_open:
                yield
                return
            with self.sparse.hidden():
                yield
        finally:
            self._is_for_peers = False

    def state(self) -> dict[str, Any]:
        """For ranks that join: where the rows are, and what servers have not applied yet. For a checkpoint: nothing."""
        if not self._is_for_peers:
            return {}
        assert self._opening is not None
        pending = self._pending and [
            *(self._pending.step, [list(one) for one in self._pending.contributions], self._pending.factor),
            msgspec.to_builtins(self._pending.handed),
        ]
        return {"opening": msgspec.to_builtins(self._opening), "owed": pending}

    def restore(self, state: dict[str, Any]) -> None:
        """Called after the model's state is restored."""
        self._pending = None
        if not state:
            return
        self._enter(msgspec.convert(state["opening"], OpenRows))
        if state["owed"] is not None:
            step, contributions, factor, handed = state["owed"]
            where = msgspec.convert(handed, list[tuple[int, Handed]])
            self._pending = _PendingRows(step, [TableGradient(*one) for one in contributions], factor, where)

    # ---- other trainings ----

    def put_down(self) -> None:
        """Servers move on to another training: copy their rows to this process."""
        assert self._pending is None, "servers lack a step that is committed"
        if self:
            self._served.leave()
        self._opening = None
        self._link.reach(0)

    def take_up(self) -> None:
        """The rows that the layers have now go to servers when the next steps begin."""
        if self:
            self._served.adopt()

    def close(self) -> None:
        self._link.close()
