"""Embedding rows on parameter servers: tables in parts, each part on one server, in memory that outlives it.

An id belongs to one of `PARTS` parts, for any number of servers, and a part to a server; so rows stay in place when
servers join and leave. Lookups return rows as of the last update; gradients arrive in several messages and are kept
until all of a lease's have arrived. An update of a part is numbered, and counts once.
Start reading at `ServerTables.apply`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from msgspec.structs import replace
from safetensors.torch import load, save
from torch import Tensor

from manyhands.comm.host_memory import Memory
from manyhands.comm.transport import MAX_MESSAGE_BYTES
from manyhands.embedding.row_layer import TableGradient, merge
from manyhands.embedding.row_optimizers import TableSpec
from manyhands.embedding.row_table import NEWEST, PARTS, RowTable, in_parts
from manyhands.parameter_server.protocol.messages import Handed, Lookup, Number, RowGradients, RowsReply
from manyhands.parameter_server.tables.row_gradient_handoff import MOST_MARKS, RowGradientHandoff

__all__ = [
    "PARTS",
    "ServerTables",
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
    """An index that orders ids by part, and where each part begins in that order; the last entry is the end."""
    is_ordered, bounds = in_parts(ids)
    if is_ordered:  # as workers send them: nothing has to move
        return slice(None), bounds
    parts = part_of(ids).numpy().astype(np.uint8)
    return torch.from_numpy(np.argsort(parts, kind="stable")), bounds  # a radix sort, for single bytes


def by_part(ids: Tensor) -> list[Tensor]:
    """Positions of the ids of each part, in order."""
    order, bounds = in_order(ids)
    positions = torch.arange(len(ids))[order]
    return [positions[start:stop] for start, stop in pairwise(bounds)]


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


class ServerTables:
    """Some parts of all tables of a model. One process at a time writes to a part."""

    def __init__(self, specs: Sequence[TableSpec], memory: Memory, parts: Sequence[int]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._tables = {
            (spec.name, part): RowTable(spec, within(memory, part), parts=PARTS) for spec in specs for part in parts
        }
        self._parts = list(parts)
        self._pieces: dict[int, dict[int, RowGradients]] = {}
        """Gradients by lease, and by their order."""
        self._handoff = RowGradientHandoff(memory)
        self._handed: dict[int, tuple[int, list[Handed]]] = {}
        """By lease: gradients in shared memory, and beside which gradient buffer."""

    def __bool__(self) -> bool:
        return bool(self._specs)

    def look_up(self, lookup: Lookup, version: int = 0) -> RowsReply | None:
        """Rows after `version` updates. None: no such table, ids of other servers, or too many for one answer."""
        spec = self._specs.get(lookup.table)
        if spec is None or len(lookup.ids) % 8 or len(lookup.ids) // 8 * 4 * spec.dim > MAX_MESSAGE_BYTES:
            return None
        ids = ids_from(lookup.ids)
        order, bounds = in_order(ids)
        ids, rows = ids[order], torch.empty(len(ids), spec.dim)
        at_most = NEWEST if lookup.at_most is None else max(lookup.at_most, 0)
        for part, (start, stop) in enumerate(pairwise(bounds)):
            if start < stop:
                table = self._tables.get((lookup.table, part))
                if table is None:
                    return None
                rows[start:stop] = table.lookup(ids[start:stop], at_most)
        found = torch.empty_like(rows)
        found[order] = rows
        return RowsReply(
            number=lookup.number, ticket=lookup.ticket, rows=to_bytes(found), version=min(version, at_most)
        )

    def keep(self, piece: RowGradients) -> None:
        """Some of a lease's gradients; an invalid message is dropped."""
        spec = self._specs.get(piece.table)
        count = len(piece.ids) // 8
        if spec is not None and len(piece.ids) == 8 * count and len(piece.gradients) == 4 * spec.dim * count:
            self._pieces.setdefault(piece.filling, {})[piece.order] = piece

    def keep_handed(self, filling: int, row: int, handed: list[Handed]) -> bool:
        """Where a lease's gradients are in memory; False: no valid gradients can be there."""
        dims = {name: spec.dim for name, spec in self._specs.items()}
        sound = all(one.table in dims and self._handoff.has(row, one, dims[one.table]) for one in handed)
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

    def gather(self, fillings: Sequence[int]) -> list[TableGradient]:
        """The sum of these leases' gradients, in the order of their slices: copies."""
        return merge(one for filling in fillings for one in self._contributions(filling))

    def gather_step(self, step: int, handed: Sequence[tuple[int, Handed]]) -> list[TableGradient] | None:
        """The sum of what ranks have put into memory for a step: copies. None: it is missing, or not of this step."""
        dims = {name: spec.dim for name, spec in self._specs.items()}
        if not all(0 <= row < MOST_MARKS and one.table in dims for row, one in handed):
            return None
        if not all(self._handoff.has(row, one, dims[one.table]) for row, one in handed):
            return None
        found = merge(self._handoff.take(row, one, self._parts, dims[one.table]) for row, one in handed)
        return found if all(self._handoff.step(row) == step for row, _ in handed) else None

    def apply(self, number: int, found: Sequence[TableGradient], factor: float, touched: Sequence[str] = ()) -> None:
        """Apply what was gathered as update `number`; repeating it changes nothing.

        Rows of `touched` tables age by it, also where it has no gradients for a part.
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
                positions = at_ids + 8 * start, at_gradients + row_bytes * start
                table.update_at(number, *positions, stop - start, factor)

    def _aged(self, touched: Sequence[str], found: Collection[str]) -> list[TableGradient]:
        """Empty gradients, for tables of which only other servers have rows in this update."""
        return [
            TableGradient(name, torch.empty(0, dtype=torch.int64), torch.empty(0, self._specs[name].dim))
            for name in touched
            if name in self._specs and name not in found
        ]

    def _contributions(self, filling: int) -> list[TableGradient]:
        pieces, (row, handed) = self._pieces.get(filling, {}), self._handed.get(filling, (0, []))
        sent = [self._contribution(pieces[order]) for order in sorted(pieces)]
        return [*sent, *(self._handoff.take(row, one, self._parts, self._specs[one.table].dim) for one in handed)]

    def _contribution(self, piece: RowGradients) -> TableGradient:
        dim = self._specs[piece.table].dim
        return TableGradient(piece.table, ids_from(piece.ids), rows_from(piece.gradients, dim))

    # ---- between hosts and between intervals ----

    def pack(self, only: Sequence[int] = range(PARTS)) -> bytes:
        """All rows and states of these parts."""
        found = {
            f"{part} {key} {name}": value.contiguous()
            for (name, part), table in self._tables.items()
            if part in only
            for key, value in table.snapshot().items()
        }
        return bytes(save(found))

    def unpack(self, data: bytes) -> None:
        """Load what `pack` returned."""
        parts: dict[tuple[str, int], dict[str, Tensor]] = {}
        for label, value in load(data).items():
            part, key, name = label.split(" ", 2)
            parts.setdefault((name, int(part)), {})[key] = value
        for table_part, saved in parts.items():
            self._tables[table_part].restore(saved)

    # ---- for a checkpoint, between intervals ----

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
        """Load what `snapshot` returned, as of update `number`.

        Rows may have seen more updates than that, in another training: each keeps its age, because a row that seems
        to come from a later update could not be distinguished from one that this update has already changed.
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
            header = {"number": torch.tensor(number), "optimizer": saved["optimizer"]}
            self._tables[name, part].restore({**header, **mine, **rest})


def seeded(specs: Sequence[TableSpec], seeds: Mapping[str, int]) -> list[TableSpec]:
    """The same tables, with the workers' seeds."""
    return [replace(spec, seed=seeds.get(spec.name, spec.seed)) for spec in specs]


def within(memory: Memory, part: int) -> Memory:
    return lambda name, num_bytes: memory(f"part {part}/{name}", num_bytes)


def pieces_of(number: Number, filling: int, found: Sequence[TableGradient]) -> list[RowGradients]:
    """What was gathered, as if one lease had sent it: for the log."""
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
