"""A worker's side of embeddings whose rows are on parameter servers: look rows up, and send gradients to their owners.

Before servers are running, and after loading a checkpoint, rows are in this process; the first interval moves them to
the servers. Start reading at `ServedRows.lookup`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhands.comm.host_memory import Memory
from manyhands.embedding.row_layer import LocalRows, Sparse, TableGradient
from manyhands.embedding.row_optimizers import TableSpec
from manyhands.embedding.row_reader import RowReader
from manyhands.embedding.row_table import NEWEST, first_places, in_parts, repeat_rows_
from manyhands.errors import CheckpointSaveFailed
from manyhands.parameter_server.protocol.messages import Handed, Lookup, Number, RowGradients
from manyhands.parameter_server.tables.row_gradient_handoff import MOST_MARKS, RowGradientHandoff
from manyhands.parameter_server.tables.server_tables import (
    PARTS,
    ServerTables,
    by_part,
    parts_of,
    rows_from,
    to_bytes,
    within,
)
from manyhands.parameter_server.worker.server_connection import ServerConnection

__all__ = ["RowCache", "ServedRows", "SharedRows"]


_MIX = np.uint64(0xBF58476D1CE4E5B9)
_NOTHING = -1


class RowCache:
    """At most `num_rows` rows of one table."""

    def __init__(self, num_rows: int, dim: int) -> None:
        self._num_rows = num_rows
        self._ids, self._rows = np.zeros(num_rows, np.int64), np.zeros((num_rows, dim), np.float32)
        self._versions, self._winners = np.full(num_rows, _NOTHING), np.zeros(num_rows, np.int64)

    def find(self, ids: Tensor, at_least: int, to: Tensor) -> tuple[Tensor, int | None]:
        """Rows of `ids` that have seen at least so many updates, into `to`. Returns which are missing, and the lowest
        number of updates that a found row has seen (None: no row was found).
        """
        wanted = ids.numpy()
        slots = self._slots(wanted)
        are_here = (self._ids[slots] == wanted) & (self._versions[slots] >= max(at_least, 0))
        to.numpy()[are_here] = self._rows[slots[are_here]]
        oldest = int(self._versions[slots[are_here]].min()) if are_here.any() else None
        return torch.from_numpy(np.flatnonzero(~are_here)), oldest

    def put(self, ids: Tensor, version: int, rows: Tensor) -> None:
        """Rows of unique ids, which have seen `version` updates."""
        new_ids, slots = ids.numpy(), self._slots(ids.numpy())
        order = np.arange(len(new_ids))
        self._winners[slots] = order  # of several with the same slot, one
        stays = self._winners[slots] == order
        slots = slots[stays]
        self._ids[slots], self._versions[slots], self._rows[slots] = new_ids[stays], version, rows.numpy()[stays]

    def clear(self) -> None:
        self._versions.fill(_NOTHING)

    def _slots(self, ids: np.ndarray) -> np.ndarray:
        mixed = ids.view(np.uint64) * _MIX
        slots: np.ndarray = ((mixed ^ (mixed >> np.uint64(31))) % np.uint64(self._num_rows)).astype(np.int64)
        return slots


# An update of a part is short, unless its server has to wait for a core, or is dead.
ROUNDS = 3


class SharedRows:
    """All parts of one table in memory that servers write to. Read-only."""

    def __init__(self, spec: TableSpec, memory: Memory) -> None:
        self._parts = [RowReader(spec, within(memory, part)) for part in range(PARTS)]

    def look_up(
        self, ids: Tensor, bounds: Sequence[int], to: Tensor, at_most: int = NEWEST, positions: Tensor | None = None
    ) -> list[int]:
        """Rows of `ids`, which are ordered by part, into `to`. Returns the parts that have to be requested instead.

        Rows of one part are of one moment, or as they were before any update beyond `at_most`. `bounds` says where
        each part begins. `positions` says which row of `to` each one goes to. All tensors are contiguous.
        """
        at_ids, at_rows, row_bytes = ids.data_ptr(), to.data_ptr(), 4 * to.shape[-1]
        at_positions = 0 if positions is None else positions.data_ptr()

        def look_up(part: int) -> bool:
            start, stop = bounds[part], bounds[part + 1]
            reader, some, num = self._parts[part], at_ids + 8 * start, stop - start
            if at_positions:
                return reader.look_up_at(some, num, at_rows, at_most, at_positions + 8 * start)
            return reader.look_up_at(some, num, at_rows + row_bytes * start, at_most)

        left = [part for part in range(PARTS) if bounds[part] < bounds[part + 1]]
        for _ in range(ROUNDS):
            left = [part for part in left if not look_up(part)]
        return left


# Rows or gradients of one message; the limit for a whole message is a little more than twice that.
MOST_BYTES = 2**18


class ServedRows:
    """The embedding rows of a model, for one worker. It is a `RowSource`."""

    def __init__(
        self, model: nn.Module, seed: int, link: ServerConnection, memory: Memory | None, *, shares: bool
    ) -> None:
        """`memory` is the servers', if the worker `shares` it; else a private copy that must be kept up to date."""
        self.sparse = Sparse(model)
        self.sparse.set_seed(seed)
        self._link, self._memory, self._local = link, memory, LocalRows()
        self._specs: dict[str, TableSpec] = {}
        self._shares = shares and memory is not None
        self._shared: dict[str, SharedRows] = {}
        self._handoff = RowGradientHandoff(memory) if memory is not None else None
        self._caches: dict[str, RowCache] = {}
        self._at_least: int | None = None
        self._at_most: int | None = None
        self.oldest: int | None = None
        """How many updates the oldest row from a cache has seen since `lacking_at_most` began."""
        self._number: Number | None = None
        self._servers = 0
        self.is_new = True
        """Rows are in this process: the next interval begins with them."""
        self.tells = False
        """Whether `state` includes the rows that servers have; a copy, for a checkpoint."""
        if self.sparse:
            self.adopt()

    def adopt(self) -> None:
        """Take over the rows that the model's layers have: the next interval begins with them."""
        state = self.sparse.state()
        self.sparse.use(self)
        self.sparse.restore(state)

    def leave(self) -> None:
        """Give the model's layers all rows, in this process, as if there were no servers, until `adopt`."""
        self.tells = True
        state = self.sparse.state()
        self.sparse.use(LocalRows())
        self.sparse.restore(state)

    def __bool__(self) -> bool:
        return bool(self.sparse)

    # ---- a source of rows ----

    def open(self, spec: TableSpec) -> None:
        self._specs[spec.name] = spec
        self._shared.pop(spec.name, None)
        if spec.cache is not None and not self._shares:
            self._caches[spec.name] = RowCache(spec.cache, spec.dim)
        self._local.open(spec)

    def lookup(self, table: str, ids: Tensor) -> Tensor:
        if self._number is None or self.is_new:
            return self._local.lookup(table, ids)
        ids, found = ids.cpu(), torch.empty(len(ids), self._specs[table].dim)
        is_ordered, bounds = in_parts(ids)
        if is_ordered and self._shares:
            left = self._read_shared(table, ids, bounds, found)
        elif (cache := self._caches.get(table)) is not None and self._at_least is not None:
            left, seen = cache.find(ids, self._at_least, found)
            self.oldest = min((one for one in (self.oldest, seen) if one is not None), default=None)
        else:
            left = torch.arange(len(ids))
        if len(left):
            self._request(table, ids, left, found)
        return found

    def take(self, table: str, ids: Tensor, inverse: Tensor) -> Tensor:
        is_ordered, bounds = in_parts(ids)
        if self._number is None or self.is_new or not (is_ordered and self._shares):
            return functional.embedding(inverse, self.lookup(table, ids))
        dim, first = self._specs[table].dim, first_places(inverse, len(ids))
        found = torch.empty(*inverse.shape, dim)
        if len(left := self._read_shared(table, ids, bounds, found, first)):
            rows = torch.empty(len(ids), dim)
            self._request(table, ids, left, rows)
            found.view(-1, dim)[first[left]] = rows[left]
        repeat_rows_(found, inverse, first)
        return found

    def _read_shared(
        self, table: str, ids: Tensor, bounds: Sequence[int], found: Tensor, positions: Tensor | None = None
    ) -> Tensor:
        """Read rows from memory that servers share into `found`. Returns the indices of ids that are left."""
        at_most = NEWEST if self._at_most is None else self._at_most
        parts = self._shared_rows(table).look_up(ids, bounds, found, at_most, positions)
        return torch.cat([torch.arange(0), *(torch.arange(bounds[part], bounds[part + 1]) for part in parts)])

    @contextmanager
    def lacking_at_most(self, updates: int, version: int, *, at_most: int | None = None) -> Iterator[None]:
        """Inside, a cached row counts if it lacks at most `updates` of the updates up to `version`.

        With `at_most`, no row has seen an update beyond that one, even where servers have applied it already.
        """
        self._at_least, self._at_most, self.oldest = version - updates, at_most, None
        try:
            yield
        finally:
            self._at_least = self._at_most = None

    def _request(self, table: str, ids: Tensor, positions: Tensor, found: Tensor) -> None:
        """Request the rows at these positions from servers."""
        dim = found.shape[1]
        by_server = [(server, positions[some]) for server, some in self._by_server(ids[positions])]
        wanted = [(server, some) for server, mine in by_server for some in _cut(mine, dim)]
        requests = [(server, self._lookup_message(table, ids[some])) for server, some in wanted]
        cache = self._caches.get(table) if self._at_least is not None else None
        for (_, some), answer in zip(wanted, self._link.look_up(requests), strict=True):
            found[some] = rows_from(answer.rows, dim)
            if cache is not None:
                cache.put(ids[some], answer.version, found[some])

    def _shared_rows(self, table: str) -> SharedRows:
        assert self._memory is not None
        if table not in self._shared:
            self._shared[table] = SharedRows(self._specs[table], self._memory)
        return self._shared[table]

    def _lookup_message(self, table: str, ids: Tensor) -> Lookup:
        assert self._number is not None
        return Lookup(
            number=self._number, ticket=self._link.ticket(), table=table, ids=to_bytes(ids), at_most=self._at_most
        )

    def apply(self, number: int, contributions: Sequence[TableGradient], factor: float) -> None:
        raise AssertionError("servers apply gradients that are sent with a lease")

    def state(self, table: str) -> dict[str, Tensor]:
        if self.is_new:
            return self._local.state(table)
        return self.everything().snapshot(table) if self.tells else {}

    def restore(self, table: str, state: Mapping[str, Tensor]) -> None:
        self._local.restore(table, state)
        self.is_new = True

    def digests(self) -> list[int]:
        return []

    # ---- intervals ----

    def install(self, version: int) -> ServerTables | None:
        """Called by the chief before an interval: put this process's rows into memory. None if none are new."""
        if not (self and self.is_new and (self._number is not None or self.updates_beyond(0))):
            return None
        tables = self.everything()
        for name in self._specs:
            tables.restore(name, version, self._local.state(name))
        return tables

    def enter(self, number: Number, servers: int) -> None:
        """From now on rows are requested from these servers."""
        if self.is_new:
            self._local = LocalRows()  # the rows are on the servers now
            for spec in self._specs.values():
                self._local.open(spec)
        self._number, self._servers, self.is_new, self.tells = number, servers, False, False
        for cache in self._caches.values():
            cache.clear()  # an interval may begin with other rows

    def updates_beyond(self, number: int) -> int:
        """How many updates beyond `number` the rows in this process have seen."""
        return max([0, *(table.number - number for table in self._local.tables.values())])

    def hand_over(self, row: int, contributions: Sequence[TableGradient]) -> list[Handed]:
        """A lease's gradients, in memory, for servers of this host; empty if there are none, or no such servers."""
        return self._handoff.put(row, contributions) if self._shares and self._handoff and contributions else []

    def hand_step(
        self, rank: int, step: int, slices: Mapping[int, Sequence[TableGradient]]
    ) -> list[tuple[int, Handed]] | None:
        """A rank's gradients of a step, in memory, each with its slice; None if servers do not share the memory."""
        if not self._shares or self._handoff is None or rank >= MOST_MARKS:
            return None
        self._handoff.mark(rank, 0)
        ones = [(slice_index, one) for slice_index, found in slices.items() for one in found]
        handed = self._handoff.put(rank, [one for _, one in ones]) if ones else []
        self._handoff.mark(rank, step)
        return [(slice_index, where) for (slice_index, _), where in zip(ones, handed, strict=True)]

    def messages(self, filling: int, contributions: Sequence[TableGradient]) -> list[list[RowGradients]]:
        """A lease's gradients, for each server those of its ids, in several messages."""
        assert self._number is not None
        found: list[list[RowGradients]] = [[] for _ in range(self._servers)]
        for table, ids, gradients in contributions:
            for server, positions in self._by_server(ids):
                for some in _cut(positions, gradients.shape[1]):
                    piece = RowGradients(
                        number=self._number,
                        filling=filling,
                        order=len(found[server]),
                        table=table,
                        ids=to_bytes(ids[some]),
                        gradients=to_bytes(gradients[some]),
                    )
                    found[server].append(piece)
        return found

    def _by_server(self, ids: Tensor) -> list[tuple[int, Tensor]]:
        positions = by_part(ids)
        mine = [
            (server, torch.cat([positions[part] for part in parts_of(server, self._servers)]))
            for server in range(self._servers)
        ]
        return [(server, some) for server, some in mine if len(some)]

    def everything(self) -> ServerTables:
        """All rows, in memory."""
        if self._memory is None:
            raise CheckpointSaveFailed(
                "Embedding rows are in the memory of the servers' host, and the chief is on another one.",
                fix=["a worker on the host that the run was started on"],
            )
        return ServerTables(list(self._specs.values()), self._memory, range(PARTS))


def _cut(positions: Tensor, dim: int) -> list[Tensor]:
    """Splits them into groups that fit into one message."""
    most = max(1, MOST_BYTES // (4 * dim))
    return [positions[start : start + most] for start in range(0, len(positions), most)]
