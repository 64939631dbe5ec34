"""Rows of embeddings on parameter servers: tables in parts, each part on one server, in memory that outlives it.

An id belongs to one of `PARTS` parts, whatever the number of servers, and a part to a server; so rows stay where they
are when servers come and go. Lookups are answered with the rows as the last update left them; gradients arrive in
pieces and are kept until all of a lease's are there. An update of a part is numbered, and counts once.
Start reading at `Tables.apply`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from manyhands.parallel.row_rules import TableSpec
from manyhands.parallel.rows import RowTable
from manyhands.parallel.served_memory import Memory
from manyhands.parallel.served_messages import Lookup, RowGradients, Rows
from manyhands.parallel.sparse import Contribution, merge

__all__ = ["PARTS", "Tables", "by_part", "ids_from", "in_parts", "part_of", "parts_of", "rows_from", "to_bytes"]

PARTS = 16
_MIX = 0x9E3779B97F4A7C15 - 2**64


def part_of(ids: Tensor) -> Tensor:
    """Which part each id belongs to; the same in every process."""
    return ((ids * _MIX) >> 60) & (PARTS - 1)


def in_parts(ids: Tensor) -> tuple[Tensor | slice, list[int]]:
    """What puts ids in the order of their parts, and where each part begins there; behind the last, the end."""
    parts = part_of(ids).numpy().astype(np.uint8)
    bounds = [0, *np.bincount(parts, minlength=PARTS).cumsum().tolist()]
    if (parts[1:] >= parts[:-1]).all():  # as workers send them: nothing need be moved
        return slice(None), bounds
    return torch.from_numpy(np.argsort(parts, kind="stable")), bounds  # of single bytes, that is a radix sort


def by_part(ids: Tensor) -> list[Tensor]:
    """Places of the ids of each part, in their order."""
    order, bounds = in_parts(ids)
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
            (spec.name, part): RowTable(_share(spec), _within(memory, part)) for spec in specs for part in parts
        }
        self._pieces: dict[int, dict[int, RowGradients]] = {}
        """Gradients by lease, and by their order."""

    def __bool__(self) -> bool:
        return bool(self._specs)

    def look_up(self, asked: Lookup) -> Rows | None:
        """None: no such table, or ids that are not this server's."""
        spec = self._specs.get(asked.table)
        if spec is None or len(asked.ids) % 8:
            return None
        ids = ids_from(asked.ids)
        order, bounds = in_parts(ids)
        ids, rows = ids[order], torch.empty(len(ids), spec.dim)
        for part, (start, stop) in enumerate(pairwise(bounds)):
            if start < stop:
                table = self._tables.get((asked.table, part))
                if table is None:
                    return None
                rows[start:stop] = table.lookup(ids[start:stop])
        found = torch.empty_like(rows)
        found[order] = rows
        return Rows(number=asked.number, ticket=asked.ticket, rows=to_bytes(found))

    def keep(self, piece: RowGradients) -> None:
        """A part of a lease's gradients; nonsense is dropped."""
        spec = self._specs.get(piece.table)
        count = len(piece.ids) // 8
        if spec is not None and len(piece.ids) == 8 * count and len(piece.gradients) == 4 * spec.dim * count:
            self._pieces.setdefault(piece.filling, {})[piece.order] = piece

    def has(self, filling: int, pieces: int) -> bool:
        return len(self._pieces.get(filling, ())) >= pieces

    def kept(self, fillings: Sequence[int]) -> list[RowGradients]:
        """All that is here of these leases."""
        return [piece for filling in fillings for piece in self._sorted(filling)]

    def drop(self, fillings: Sequence[int]) -> None:
        for filling in fillings:
            self._pieces.pop(filling, None)

    def drop_until(self, filling: int) -> None:
        """All up to this one."""
        self.drop([one for one in self._pieces if one <= filling])

    def apply(self, number: int, fillings: Sequence[int], factor: float, touched: Sequence[str] = ()) -> None:
        """The gradients of these leases, in the order of their slices, as update `number`; done again, nothing.

        Rows of `touched` tables grow older by it, also where it has no gradients for a part.
        """
        found = merge(self._contribution(piece) for filling in fillings for piece in self._sorted(filling))
        for name, ids, gradients in [*found, *self._aged(touched, {one.table for one in found})]:
            order, bounds = in_parts(ids)
            ids, gradients = ids[order], gradients[order]
            for part, (start, stop) in enumerate(pairwise(bounds)):
                table, mine = self._tables.get((name, part)), slice(start, stop)
                if table is None or table.number >= number:
                    continue
                if start < stop or (name in touched and table.spec.keep_steps is not None):
                    table.update(number, ids[mine], gradients[mine], factor=factor)

    def _aged(self, touched: Sequence[str], found: Collection[str]) -> list[Contribution]:
        """Nothing, for tables of which only other servers have rows in this update."""
        return [
            Contribution(name, torch.empty(0, dtype=torch.int64), torch.empty(0, self._specs[name].dim))
            for name in touched
            if name in self._specs and name not in found
        ]

    def _sorted(self, filling: int) -> list[RowGradients]:
        pieces = self._pieces.get(filling, {})
        return [pieces[order] for order in sorted(pieces)]

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
        """Become what `snapshot` told of, as update `number` left it."""
        rows, candidates = part_of(saved["ids"]), part_of(saved["candidates"])
        of_rows = ("ids", "rows", "states", "updates")
        for part in range(PARTS):
            mine = {key: value[rows == part] for key, value in saved.items() if key in of_rows}
            rest = {
                key: value[candidates == part] for key, value in saved.items() if value.dim() and key not in of_rows
            }
            said = {"number": torch.tensor(number), "optimizer": saved["optimizer"]}
            self._tables[name, part].restore({**said, **mine, **rest})


def _share(spec: TableSpec) -> TableSpec:
    """A part's share of the bound."""
    return spec if spec.max_bytes is None else msgspec.structs.replace(spec, max_bytes=spec.max_bytes // PARTS)


def _within(memory: Memory, part: int) -> Memory:
    return lambda name, num_bytes: memory(f"part {part}/{name}", num_bytes)
