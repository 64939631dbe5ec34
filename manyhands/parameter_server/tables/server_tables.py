"""Rows of embeddings on parameter servers: tables in parts, each part on one server, in memory that outlives it.

An id belongs to one of `PARTS` parts, whatever the number of servers, and a part to a server; so rows stay where they
are when servers come and go. Lookups are answered with the rows as the last update left them; gradients arrive in
pieces and are kept until all of a lease's are there. An update of a part is numbered, and counts once.
Start reading at `Tables.apply`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from msgspec.structs import replace
from safetensors.torch import load, save
from torch import Tensor

from manyhands.comm.transport import MAX_MESSAGE_BYTES
from manyhands.embedding.row_layer import Contribution, merge
from manyhands.embedding.row_optimizers import TableSpec
from manyhands.embedding.row_table import NEWEST, PARTS, RowTable, in_parts
from manyhands.parameter_server.memory.versioned_memory import Memory
from manyhands.parameter_server.protocol.messages import Handed, Lookup, Number, RowGradients, Rows
from manyhands.parameter_server.tables.row_gradient_handoff import MOST_MARKS, HandedOver

__all__ = [
    "PARTS",
    "Tables",
    "by_part",
    "in_order",
    "part_of",
    "parts_of",
    "pieces_of",
    "rows_from",
    "seeded",
    "to_bytes",
    "within",
]

_MIX = 0x9E3779B97F4A7C15 - 2**64


def part_of(ids: Tensor) -> Tensor:
    """Which part each id belongs to; the same in every process."""
    return ((ids * _MIX) >> 60) & (PARTS - 1)


def in_order(ids: Tensor) -> tuple[Tensor | slice, list[int]]:
    """What puts ids in the order of their parts, and where each part begins there; behind the last, the end."""
    is_ordered, bounds = in_parts(ids)
    if is_ordered:  # as workers send them: nothing need be moved
        return slice(None), bounds
    parts = part_of(ids).numpy().astype(np.uint8)
    return torch.from_numpy(np.argsort(parts, kind="stable")), bounds  # of single bytes, that is a radix sort


def by_part(ids: Tensor) -> list[Tensor]:
    """Places of the ids of each part, in their order."""
    order, bounds = in_order(ids)
    places = torch.arange(len(ids))[order]
    return [places[start:stop] for start, stop in pairwise(bounds)]


def parts_of(server: int, servers: int) -> list[int]:
    return list(range(server, PARTS, servers))


def to_bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().numpy().tobytes())


def ids_from(data: bytes) -> Tensor:
    return _from(data, torch.int64)


def rows_from(data: bytes, dim: int) -> Tensor:
    return _from(data, torch.float32).view(-1, dim)


def _from(data: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


class Tables:
    """Some parts of all tables of a model. One process at a time changes a part."""

    def __init__(self, specs: Sequence[TableSpec], memory: Memory, parts: Sequence[int]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._tables = {
            (spec.name, part): RowTable(spec, within(memory, part), parts=PARTS) for spec in specs for part in parts
        }
        self._parts = list(parts)
        self._pieces: dict[int, dict[int, RowGradients]] = {}
        """Gradients by lease, and by their order."""
        self._shelf = HandedOver(memory)
        self._handed: dict[int, tuple[int, list[Handed]]] = {}
        """By lease: those that lie in memory, and beside which row."""

    def __bool__(self) -> bool:
        return bool(self._specs)

    def look_up(self, asked: Lookup, version: int = 0) -> Rows | None:
        """After so many updates. None: no such table, ids that are not this server's, or more than an answer has."""
        spec = self._specs.get(asked.table)
        if spec is None or len(asked.ids) % 8 or len(asked.ids) // 8 * 4 * spec.dim > MAX_MESSAGE_BYTES:
            return None
        ids = ids_from(asked.ids)
        order, bounds = in_order(ids)
        ids, rows = ids[order], torch.empty(len(ids), spec.dim)
        at_most = NEWEST if asked.at_most is None else max(asked.at_most, 0)
        for part, (start, stop) in enumerate(pairwise(bounds)):
            if start < stop:
                table = self._tables.get((asked.table, part))
                if table is None:
                    return None
                rows[start:stop] = table.lookup(ids[start:stop], at_most)
        found = torch.empty_like(rows)
        found[order] = rows
        return Rows(number=asked.number, ticket=asked.ticket, rows=to_bytes(found), version=min(version, at_most))

    def keep(self, piece: RowGradients) -> None:
        """A part of a lease's gradients; nonsense is dropped."""
        spec = self._specs.get(piece.table)
        count = len(piece.ids) // 8
        if spec is not None and len(piece.ids) == 8 * count and len(piece.gradients) == 4 * spec.dim * count:
            self._pieces.setdefault(piece.filling, {})[piece.order] = piece

    def keep_handed(self, filling: int, row: int, handed: list[Handed]) -> bool:
        """Where a lease's gradients lie; False: nothing of this kind can be there."""
        dims = {name: spec.dim for name, spec in self._specs.items()}
        sound = all(one.table in dims and self._shelf.has(row, one, dims[one.table]) for one in handed)
        if sound and handed:
            self._handed[filling] = row, handed
        return sound

    def has(self, filling: int, pieces: int) -> bool:
        return len(self._pieces.get(filling, ())) >= pieces

    def drop(self, fillings: Sequence[int]) -> None:
        for filling in fillings:
            self._pieces.pop(filling, None)
            self._handed.pop(filling, None)

    def drop_until(self, filling: int) -> None:
        """All up to this one."""
        self.drop([one for one in self._pieces if one <= filling])

    def gather(self, fillings: Sequence[int]) -> list[Contribution]:
        """The sum of these leases' gradients, in the order of their slices: copies."""
        return merge(one for filling in fillings for one in self._contributions(filling))

    def gather_step(self, step: int, handed: Sequence[tuple[int, Handed]]) -> list[Contribution] | None:
        """The sum of what ranks have put into memory for a step: copies. None: it is not there, or not of this step."""
        dims = {name: spec.dim for name, spec in self._specs.items()}
        if not all(0 <= row < MOST_MARKS and one.table in dims for row, one in handed):
            return None
        if not all(self._shelf.has(row, one, dims[one.table]) for row, one in handed):
            return None
        found = merge(self._shelf.take(row, one, self._parts, dims[one.table]) for row, one in handed)
        return found if all(self._shelf.step(row) == step for row, _ in handed) else None

    def apply(self, number: int, found: Sequence[Contribution], factor: float, touched: Sequence[str] = ()) -> None:
        """What was gathered, as update `number`; done again, nothing.

        Rows of `touched` tables grow older by it, also where it has no gradients for a part.
        """
        for name, ids, gradients in [*found, *self._aged(touched, {one.table for one in found})]:
            order, bounds = in_order(ids)
            self._apply_to_parts(number, name, bounds, ids[order], gradients[order], factor, ages=name in touched)

    def _apply_to_parts(
        self,
        number: int,
        name: str,
        bounds: Sequence[int],
        ids: Tensor,
        gradients: Tensor,
        factor: float,
        *,
        ages: bool,
    ) -> None:
        ids, gradients = ids.contiguous(), gradients.contiguous()
        at_ids, at_gradients, row_bytes = ids.data_ptr(), gradients.data_ptr(), 4 * self._specs[name].dim
        for part, (start, stop) in enumerate(pairwise(bounds)):
            table = self._tables.get((name, part))
            if table is None or table.number >= number:
                continue
            if start < stop or (ages and table.spec.keep_steps is not None):
                places = at_ids + 8 * start, at_gradients + row_bytes * start
                table.update_at(number, *places, stop - start, factor)

    def _aged(self, touched: Sequence[str], found: Collection[str]) -> list[Contribution]:
        """Nothing, for tables of which only other servers have rows in this update."""
        return [
            Contribution(name, torch.empty(0, dtype=torch.int64), torch.empty(0, self._specs[name].dim))
            for name in touched
            if name in self._specs and name not in found
        ]

    def _contributions(self, filling: int) -> list[Contribution]:
        pieces, (row, handed) = self._pieces.get(filling, {}), self._handed.get(filling, (0, []))
        sent = [self._contribution(pieces[order]) for order in sorted(pieces)]
        return [*sent, *(self._shelf.take(row, one, self._parts, self._specs[one.table].dim) for one in handed)]

    def _contribution(self, piece: RowGradients) -> Contribution:
        dim = self._specs[piece.table].dim
        return Contribution(piece.table, ids_from(piece.ids), rows_from(piece.gradients, dim))

    # ---- between hosts, between courses ----

    def pack(self, only: Sequence[int] = range(PARTS)) -> bytes:
        """All that is here of these parts."""
        found = {
            f"{part} {key} {name}": value.contiguous()
            for (name, part), table in self._tables.items()
            if part in only
            for key, value in table.snapshot().items()
        }
        return bytes(save(found))

    def unpack(self, data: bytes) -> None:
        """Become what others packed."""
        parts: dict[tuple[str, int], dict[str, Tensor]] = {}
        for label, value in load(data).items():
            part, key, name = label.split(" ", 2)
            parts.setdefault((name, int(part)), {})[key] = value
        for place, saved in parts.items():
            self._tables[place].restore(saved)

    # ---- for a checkpoint, between courses ----

    def snapshot(self, name: str) -> dict[str, Tensor]:
        """All parts of a table as one, in the order of ids."""
        parts = [self._tables[name, part].snapshot() for part in range(PARTS)]
        whole = {key: torch.cat([part[key] for part in parts]) for key in parts[0] if parts[0][key].dim()}
        rows, candidates = whole["ids"].argsort(), whole["candidates"].argsort()
        order = {"ids": rows, "rows": rows, "states": rows, "updates": rows}
        sorted_ = {key: value[order.get(key, candidates)] for key, value in whole.items()}
        number = max(int(part["number"]) for part in parts)
        return {"number": torch.tensor(number), "optimizer": parts[0]["optimizer"], **sorted_}

    def restore(self, name: str, number: int, saved: Mapping[str, Tensor]) -> None:
        """Become what `snapshot` told of, as update `number` left it.

        Rows may have seen more updates than that, in another training: each stays as old as it is, because one that
        seems to come from a later update could not be told from one that this update has changed already.
        """
        beyond = max(0, int(saved["number"]) - number)
        ages = {key: (saved[key] - beyond).clamp(min=0) for key in ("updates", "candidate_updates")}
        saved = {**saved, **ages}
        rows, candidates = part_of(saved["ids"]), part_of(saved["candidates"])
        of_rows = ("ids", "rows", "states", "updates")
        for part in range(PARTS):
            mine = {key: value[rows == part] for key, value in saved.items() if key in of_rows}
            rest = {
                key: value[candidates == part] for key, value in saved.items() if value.dim() and key not in of_rows
            }
            said = {"number": torch.tensor(number), "optimizer": saved["optimizer"]}
            self._tables[name, part].restore({**said, **mine, **rest})


def seeded(specs: Sequence[TableSpec], seeds: Mapping[str, int]) -> list[TableSpec]:
    """The same tables, with the seeds that workers have for them."""
    return [replace(spec, seed=seeds.get(spec.name, spec.seed)) for spec in specs]


def within(memory: Memory, part: int) -> Memory:
    return lambda name, num_bytes: memory(f"part {part}/{name}", num_bytes)


def pieces_of(number: Number, filling: int, found: Sequence[Contribution]) -> list[RowGradients]:
    """What was gathered, as if one lease had sent it: to keep it beyond this host's memory."""
    return [
        RowGradients(
            number=number,
            filling=filling,
            order=order,
            table=one.table,
            ids=one.ids.contiguous().numpy().tobytes(),
            gradients=one.gradients.contiguous().numpy().tobytes(),
        )
        for order, one in enumerate(found)
    ]
