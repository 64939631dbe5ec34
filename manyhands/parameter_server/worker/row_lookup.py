"""A worker's side of embeddings whose rows are on parameter servers: look rows up, and send gradients to their owners.

Before there are servers to ask, and for what a checkpoint brought, rows are in this process; the first course takes
them to the servers. Start reading at `ServedRows.lookup`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhands.embedding.row_layer import Contribution, LocalRows, Sparse
from manyhands.embedding.row_optimizers import TableSpec
from manyhands.embedding.row_table import NEWEST, first_places, in_parts, repeat_rows_
from manyhands.errors import CheckpointSaveFailed
from manyhands.parameter_server.memory.versioned_memory import Memory
from manyhands.parameter_server.protocol.messages import Handed, Lookup, Number, RowGradients
from manyhands.parameter_server.tables.row_gradient_handoff import MOST_MARKS, HandedOver
from manyhands.parameter_server.tables.server_tables import PARTS, Tables, by_part, parts_of, rows_from, to_bytes
from manyhands.parameter_server.worker.row_cache import RowCache
from manyhands.parameter_server.worker.server_connection import Link
from manyhands.parameter_server.worker.shared_row_lookup import SharedRows

__all__ = ["ServedRows"]

# Of one message's rows or gradients; what a message may have in all is a little more than twice that.
MOST_BYTES = 2**18


class ServedRows:
    """The rows of a model's embeddings, for one worker. It is a `RowSource`."""

    def __init__(self, model: nn.Module, seed: int, link: Link, memory: Memory | None, *, shares: bool) -> None:
        """`memory` is the servers', if it `shares` that with them; else a copy that has to be brought up to date."""
        self.sparse = Sparse(model)
        self.sparse.set_seed(seed)
        self._link, self._memory, self._local = link, memory, LocalRows()
        self._specs: dict[str, TableSpec] = {}
        self._shares = shares and memory is not None
        self._shared: dict[str, SharedRows] = {}
        self._shelf = HandedOver(memory) if memory is not None else None
        self._caches: dict[str, RowCache] = {}
        self._at_least: int | None = None
        self._at_most: int | None = None
        self.oldest: int | None = None
        """How many updates the oldest row has seen that a cache has given since `lacking_at_most` began."""
        self._number: Number | None = None
        self._servers = 0
        self.is_new = True
        """Rows are in this process: the next course begins with them."""
        self.tells = False
        """Whether `state` has the rows that servers have; a copy, for a checkpoint."""
        if self.sparse:
            self.adopt()

    def adopt(self) -> None:
        """Take over the rows that the model's layers have: the next course begins with them."""
        state = self.sparse.state()
        self.sparse.use(self)
        self.sparse.restore(state)

    def leave(self) -> None:
        """Leave the model's layers with all rows in this process, as if there were no servers, until `adopt`."""
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
            left = self._peek(table, ids, bounds, found)
        elif (cache := self._caches.get(table)) is not None and self._at_least is not None:
            left, seen = cache.find(ids, self._at_least, found)
            self.oldest = min((one for one in (self.oldest, seen) if one is not None), default=None)
        else:
            left = torch.arange(len(ids))
        if len(left):
            self._ask_for(table, ids, left, found)
        return found

    def take(self, table: str, ids: Tensor, inverse: Tensor) -> Tensor:
        is_ordered, bounds = in_parts(ids)
        if self._number is None or self.is_new or not (is_ordered and self._shares):
            return functional.embedding(inverse, self.lookup(table, ids))
        dim, first = self._specs[table].dim, first_places(inverse, len(ids))
        found = torch.empty(*inverse.shape, dim)
        if len(left := self._peek(table, ids, bounds, found, first)):
            rows = torch.empty(len(ids), dim)
            self._ask_for(table, ids, left, rows)
            found.view(-1, dim)[first[left]] = rows[left]
        repeat_rows_(found, inverse, first)
        return found

    def _peek(
        self, table: str, ids: Tensor, bounds: Sequence[int], found: Tensor, places: Tensor | None = None
    ) -> Tensor:
        """Rows from memory that servers share, each to its place; which of the ids are left."""
        at_most = NEWEST if self._at_most is None else self._at_most
        parts = self._shared_rows(table).look_up(ids, bounds, found, at_most, places)
        return torch.cat([torch.arange(0), *(torch.arange(bounds[part], bounds[part + 1]) for part in parts)])

    @contextmanager
    def lacking_at_most(self, updates: int, version: int, *, at_most: int | None = None) -> Iterator[None]:
        """Inside, rows from a cache count that lack at most so many of the updates to `version`.

        With `at_most`, no row has seen an update beyond that one, also where servers have made it already.
        """
        self._at_least, self._at_most, self.oldest = version - updates, at_most, None
        try:
            yield
        finally:
            self._at_least = self._at_most = None

    def _ask_for(self, table: str, ids: Tensor, places: Tensor, found: Tensor) -> None:
        """The rows at these places."""
        dim = found.shape[1]
        by_server = [(server, places[some]) for server, some in self._by_server(ids[places])]
        wanted = [(server, some) for server, mine in by_server for some in _cut(mine, dim)]
        questions = [(server, self._question(table, ids[some])) for server, some in wanted]
        cache = self._caches.get(table) if self._at_least is not None else None
        for (_, some), answer in zip(wanted, self._link.look_up(questions), strict=True):
            found[some] = rows_from(answer.rows, dim)
            if cache is not None:
                cache.put(ids[some], answer.version, found[some])

    def _shared_rows(self, table: str) -> SharedRows:
        assert self._memory is not None
        if table not in self._shared:
            self._shared[table] = SharedRows(self._specs[table], self._memory)
        return self._shared[table]

    def _question(self, table: str, ids: Tensor) -> Lookup:
        assert self._number is not None
        return Lookup(
            number=self._number, ticket=self._link.ticket(), table=table, ids=to_bytes(ids), at_most=self._at_most
        )

    def apply(self, number: int, contributions: Sequence[Contribution], factor: float) -> None:
        raise AssertionError("servers apply what they are sent with a lease")

    def state(self, table: str) -> dict[str, Tensor]:
        if self.is_new:
            return self._local.state(table)
        return self.everything().snapshot(table) if self.tells else {}

    def restore(self, table: str, state: Mapping[str, Tensor]) -> None:
        self._local.restore(table, state)
        self.is_new = True

    def digests(self) -> list[int]:
        return []

    # ---- courses ----

    def install(self, version: int) -> Tables | None:
        """By the chief, before a course: rows of this process are in memory. None if there are no new ones."""
        if not (self and self.is_new and (self._number is not None or self.updates_beyond(0))):
            return None
        tables = self.everything()
        for name in self._specs:
            tables.restore(name, version, self._local.state(name))
        return tables

    def enter(self, number: Number, servers: int) -> None:
        """From now on rows are asked for from these."""
        if self.is_new:
            self._local = LocalRows()  # what was here is there now
            for spec in self._specs.values():
                self._local.open(spec)
        self._number, self._servers, self.is_new, self.tells = number, servers, False, False
        for cache in self._caches.values():
            cache.clear()  # a course may begin with other rows

    def updates_beyond(self, number: int) -> int:
        """How many more updates than that the rows in this process have seen."""
        return max([0, *(table.number - number for table in self._local.tables.values())])

    def hand_over(self, row: int, contributions: Sequence[Contribution]) -> list[Handed]:
        """A lease's gradients, in memory, for servers of this host; empty where there are none, or no such servers."""
        return self._shelf.put(row, contributions) if self._shares and self._shelf and contributions else []

    def hand_step(
        self, rank: int, step: int, slices: Mapping[int, Sequence[Contribution]]
    ) -> list[tuple[int, Handed]] | None:
        """A rank's gradients of a step, in memory, each with its slice; None where servers do not share it."""
        if not self._shares or self._shelf is None or rank >= MOST_MARKS:
            return None
        self._shelf.mark(rank, 0)
        ones = [(place, one) for place, found in slices.items() for one in found]
        handed = self._shelf.put(rank, [one for _, one in ones]) if ones else []
        self._shelf.mark(rank, step)
        return [(place, where) for (place, _), where in zip(ones, handed, strict=True)]

    def messages(self, filling: int, contributions: Sequence[Contribution]) -> list[list[RowGradients]]:
        """A lease's gradients, for each server those of its ids, in pieces."""
        assert self._number is not None
        found: list[list[RowGradients]] = [[] for _ in range(self._servers)]
        for table, ids, gradients in contributions:
            for server, places in self._by_server(ids):
                for some in _cut(places, gradients.shape[1]):
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
        places = by_part(ids)
        mine = [
            (server, torch.cat([places[part] for part in parts_of(server, self._servers)]))
            for server in range(self._servers)
        ]
        return [(server, some) for server, some in mine if len(some)]

    def everything(self) -> Tables:
        """All rows in memory."""
        if self._memory is None:
            raise CheckpointSaveFailed(
                "Rows of embeddings are in the memory of the servers' host, and the chief is on another.",
                fix=["a worker on the host that the run was started on"],
            )
        return Tables(list(self._specs.values()), self._memory, range(PARTS))


def _cut(places: Tensor, dim: int) -> list[Tensor]:
    """In as many as one message takes."""
    most = max(1, MOST_BYTES // (4 * dim))
    return [places[start : start + most] for start in range(0, len(places), most)]
