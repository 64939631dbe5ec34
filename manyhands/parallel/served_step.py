"""Rows within a step of replicas, where parameter servers have them: `mode="hybrid"`.

Every rank gets the sum of a step's gradients for rows, as without servers; then one rank sends each server its share,
and servers apply it under the step's number, once. A rank whose step fails does it again with the rows it began with,
so no server may be ahead of any rank: shares are sent when all ranks have committed the step, and nobody looks rows up
before all servers have them. What a rank owes to servers until then is part of its state. Start reading at
`ServedStep.settle`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
from torch import nn

from manyhands.comm.axis import Axis
from manyhands.parallel.served_link import Link
from manyhands.parallel.served_lookup import ServedRows
from manyhands.parallel.served_memory import Memory
from manyhands.parallel.served_messages import ApplyRows, Number, OpenRows, RowGradients
from manyhands.parallel.sparse import Contribution
from manyhands.parallel.sparse_step import SparseStep

__all__ = ["ServedStep"]


class _Owed(NamedTuple):
    """What a committed step has for servers."""

    step: int
    contributions: list[Contribution]
    factor: float


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
        generation: Callable[[], tuple[int, int]],
        wait_for_chief: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        """`shares`: the memory is the servers'. `num_servers` says how many there should be, `generation` which one of
        workers this is.
        """
        super().__init__(model, seed)
        self._served, self._link = ServedRows(model, seed, link, memory, shares=shares), link
        self._num_servers, self._generation, self._wait_for_chief = num_servers, generation, wait_for_chief
        self._tell, self._told_servers = tell, 0
        self._opening: OpenRows | None = None
        self._openings = 0
        self._owed: _Owed | None = None
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
        proposed = msgspec.msgpack.encode(self._propose(step)) if axis.rank == 0 else b""
        opening = msgspec.msgpack.decode(axis.all_gather_bytes("servers of rows", proposed)[0], type=OpenRows)
        if axis.rank == 0:
            self._served.install(opening.step + opening.base)
            self._link.open(opening)
        self._wait_for_chief(f"rows {opening.number}")
        self._enter(opening)

    def _propose(self, step: int) -> OpenRows:
        self._openings += 1
        number: Number = (*self._generation(), self._openings)
        return OpenRows(number=number, servers=self._num_servers(), step=step, base=self._served.updates_beyond(step))

    def _enter(self, opening: OpenRows) -> None:
        self._opening = opening
        self._link.follow(opening)
        self._served.enter(opening.number, opening.servers)
        self._served.tells = True

    # ---- steps ----

    def apply(self, number: int) -> None:
        """The step is committed here. Servers hear of it in `settle`."""
        self._owed = _Owed(number, self._summed, self.factor)
        self._mine, self._summed = {}, []

    def settle(self, axis: Axis) -> None:
        """Have servers apply the step that all ranks are to have committed. By all ranks together, and repeatable."""
        axis.barrier("step taken by all")
        if self._owed is not None:
            self._send(self._owed, axis)
        axis.barrier("rows on servers")
        self._owed = None
        self._look_at_servers()

    def _send(self, owed: _Owed, axis: Axis) -> None:
        """This rank's share of the sending: to every server one rank does it."""
        shares = self._served.messages(owed.step, owed.contributions)
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
            tables=[one.table for one in owed.contributions],
            factor=owed.factor,
        )

    def _look_at_servers(self) -> None:
        """Rows do not move while they are served."""
        assert self._opening is not None
        wanted, there = self._num_servers(), self._opening.servers
        if wanted not in (there, self._told_servers):
            self._told_servers = wanted
            self._tell(f'servers wanted: {wanted}; but with mode="hybrid" rows stay on {there} while the run lasts')

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
        owed = self._owed and [self._owed.step, [list(one) for one in self._owed.contributions], self._owed.factor]
        return {"opening": msgspec.to_builtins(self._opening), "owed": owed}

    def restore(self, state: dict[str, Any]) -> None:
        """After the model's own state."""
        self._owed = None
        if not state:
            return
        self._enter(msgspec.convert(state["opening"], OpenRows))
        if state["owed"] is not None:
            step, contributions, factor = state["owed"]
            self._owed = _Owed(step, [Contribution(*one) for one in contributions], factor)

    def close(self) -> None:
        self._link.close()
