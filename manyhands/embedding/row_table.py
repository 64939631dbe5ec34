"""Tables of embedding rows by 64-bit id, in flat memory that may outlive the process; native/rows.c does the work.

A `RowTable` looks rows up without changing anything and applies numbered updates, each completely or not at all, even
if the process is killed. The caller provides its memory: with a `Memory` of shared memory, the next process that opens
the table finds it as the last committed update left it. It grows by moving to a larger region. Its rows and their
values are a function of the updates only. Start reading at `RowTable.update`.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from manyhands.comm.host_memory import Memory, Segment
from manyhands.comm.shared_register import Register
from manyhands.embedding.row_optimizers import MOST, OPTIMIZERS, TableSpec
from manyhands.errors import CheckpointMismatch, DataError, EnvironmentProblem, SpecError
from manyhands.native import library, why_not

__all__ = [
    "NEWEST",
    "PARTS",
    "RowTable",
    "TableCapacity",
    "add_rows",
    "first_places",
    "in_parts",
    "larger",
    "most_room",
    "open_region",
    "private_memory",
    "region_register",
    "repeat_rows_",
    "unique",
]

PARTS = 16
"""An id belongs to one of this many parts of its table, on any number of servers; as in native/rows.h."""
NEWEST = 2**64 - 1
"""Later than all updates: rows as the last one left them."""
FIRST_ROWS, FIRST_TOUCHED = 1024, 4096
_PAGE = mmap.PAGESIZE
_WHERE = struct.Struct("<QQ")
CANDIDATE = 2**31
TURNS = 16
"""A digest covers one in this many ids."""


class TableCapacity(NamedTuple):
    """The capacity of a region; `touched`: rows in one update."""

    dim: int
    num_states: int
    rows: int
    candidates: int
    touched: int

    @property
    def num_bytes(self) -> int:
        return -(-int(library.rows_bytes(tuple(self))) // _PAGE) * _PAGE


def most_room(spec: TableSpec, parts: int = 1) -> TableCapacity:
    """As many rows as `max_bytes` allows for one of `parts` parts of a table.

    The journal of an update is not included: its size depends on the rows touched.
    """
    num_states, per_row = spec.num_states, 1 if spec.admit_after > 1 else 0
    if spec.max_bytes is None:
        return TableCapacity(spec.dim, num_states, MOST, MOST * per_row, 0)
    low, high = 0, MOST
    while low < high:  # the most that fit
        rows = (low + high + 1) // 2
        fits = library.rows_bytes((spec.dim, num_states, rows, rows * per_row, 0)) <= spec.max_bytes // parts
        low, high = (rows, high) if fits else (low, rows - 1)
    if low == 0:
        least = library.rows_bytes((spec.dim, num_states, 1, per_row, 0))
        raise SpecError(
            f"max_bytes is {spec.max_bytes}, which is less than one row{_in_each(parts)} takes.",
            where=f"table {spec.name!r}",
            fix=[f"max_bytes={parts * least} or more"],
        )
    return TableCapacity(spec.dim, num_states, low, low * per_row, 0)


def _in_each(parts: int) -> str:
    return f" in each of its {parts} parts" if parts > 1 else ""


def larger(room: TableCapacity, wanted: TableCapacity, most: TableCapacity) -> TableCapacity:
    """Capacity for what is wanted, and as much again, but never more than `most`."""
    touched = room.touched if wanted.touched <= room.touched else 2 * wanted.touched
    if wanted.rows > most.rows or wanted.candidates > most.candidates:
        return most._replace(touched=touched)  # from now on, old rows are dropped
    rows = room.rows if wanted.rows <= room.rows else max(2 * room.rows, wanted.rows)
    candidates = room.candidates
    if wanted.candidates > candidates:
        candidates = max(2 * candidates, wanted.candidates, FIRST_ROWS)
    return room._replace(rows=min(rows, most.rows), candidates=min(candidates, most.candidates), touched=touched)


class _Private(Segment):
    def __init__(self, num_bytes: int) -> None:
        super().__init__(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def use_large_pages(self) -> None:
        with contextlib.suppress(OSError):  # a kernel without them
            self.buffer.madvise(mmap.MADV_HUGEPAGE)

    def free(self) -> None:
        self.buffer.madvise(mmap.MADV_DONTNEED)


def private_memory(name: str, num_bytes: int) -> Segment:
    """Memory of this process only."""
    return _Private(num_bytes)


def region_register(spec: TableSpec, memory: Memory) -> Register:
    """The register that says where the table is now; empty before there is one."""
    return Register(memory(f"rows of {spec.name}", _PAGE))


def open_region(spec: TableSpec, memory: Memory, where: bytes) -> tuple[int, Segment]:
    """The region that the register names: its unique number, and its memory."""
    generation, num_bytes = _WHERE.unpack(where)
    segment = memory(f"rows of {spec.name}, region {generation} of {num_bytes} bytes", num_bytes)
    segment.use_large_pages()  # row access is random
    return generation, segment


class RowTable:
    """One table. One process at a time updates it; opening it undoes an update in which another was killed."""

    def __init__(
        self, spec: TableSpec, memory: Memory = private_memory, *, num_rows: int = FIRST_ROWS, parts: int = 1
    ) -> None:
        """`num_rows`: initial capacity, if it is known. The table may be one of several `parts`."""
        if why_not():
            raise EnvironmentProblem(
                f"Embeddings by id are computed in C, and {why_not()}.",
                fix=["a C compiler, and manyhands installed again", "torch.nn.Embedding"],
            )
        self.spec, self._memory, self._rule = spec, memory, spec.rule()
        self._parts, self._most = parts, most_room(spec, parts)
        self.recovered = False
        """Whether opening the table undid an update."""
        self._register = region_register(spec, memory)
        self._segment, self._generation = self._register.segment, 0  # until there is a region
        if self._register.value:
            self._generation, segment = open_region(spec, memory, self._register.value)
            self._open(segment)
        else:
            rows = min(num_rows, self._most.rows)
            candidates = min(rows, self._most.candidates)
            self._replace(
                TableCapacity(spec.dim, spec.num_states, rows, candidates, FIRST_TOUCHED), lambda segment: None
            )

    # ---- what callers use ----

    @property
    def number(self) -> int:
        """The number of the last committed update; 0 at first."""
        return int(library.rows_count(self._address)[0])

    def __len__(self) -> int:
        return int(library.rows_count(self._address)[1])

    @property
    def num_candidates(self) -> int:
        """Ids that were seen, but not often enough for a row."""
        return int(library.rows_count(self._address)[2])

    @property
    def num_bytes(self) -> int:
        return self._segment.num_bytes

    @property
    def _address(self) -> int:
        return self._segment.address

    def lookup(self, ids: Tensor, at_most: int = NEWEST) -> Tensor:
        """A row of weights for each of `ids`: the initial weights if there is none. Changes nothing.

        If the last update is later than `at_most`, rows are as they were before it; older versions are not available.
        """
        ids = _flat_ids(ids)
        rows = torch.empty(len(ids), self.spec.dim)
        library.rows_lookup(self._address, self._rule, ids.data_ptr(), len(ids), rows.data_ptr(), at_most)
        return rows

    def update(self, number: int, ids: Tensor, gradients: Tensor, *, factor: float = 1.0) -> None:
        """Apply the gradients of different ids, each times `factor`. Afterwards the table's number is `number`.

        Applied completely or not at all, even if the process is killed at any instruction. Numbers ascend, to
        2**32 - 1.
        """
        ids, gradients = _flat_ids(ids), gradients.detach().to("cpu", torch.float32).contiguous()
        if gradients.shape != (len(ids), self.spec.dim):
            raise DataError(f"{len(ids)} ids with gradients of shape {list(gradients.shape)}: {self._about}.")
        self.update_at(number, ids.data_ptr(), gradients.data_ptr(), len(ids), factor)

    def update_at(self, number: int, ids: int, gradients: int, count: int, factor: float) -> None:
        """The same by address, for `count` int64 ids and float32 rows, both contiguous."""
        while True:
            may_evict = self._room[2:4] == self._most[2:4]
            failed, wanted = library.rows_update(
                self._address, self._rule, number, ids, gradients, count, factor, may_evict
            )
            if failed == 0:
                return
            if failed != library.ROWS_NO_ROOM:
                raise self._refusal(failed, number)
            room = larger(self._room, TableCapacity(*wanted), self._most)
            if room == self._room:
                raise self._too_small(count)
            self._grow(room)

    def digest(self, turn: int | None = None) -> int:
        """A digest of one in `TURNS` ids, the same for the same rows; `turn` selects which, by default by number."""
        turn = self.number * 40503 >> 8 if turn is None else turn
        return int(library.rows_digest(self._address, turn % TURNS, TURNS))

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of everything, sorted by id."""
        number, num_rows, num_candidates = library.rows_count(self._address)
        count = num_rows + num_candidates
        ids, places, updates = np.empty(count, np.int64), np.empty(count, np.uint32), np.empty(count, np.uint32)
        library.rows_list(self._address, *(one.ctypes.data for one in (ids, places, updates)))
        order = np.argsort(ids)
        ids, places, updates = ids[order], places[order], updates[order]
        is_row = places < CANDIDATE
        rows = self._rows(self._segment)[places[is_row]]
        dim, end = self.spec.dim, self.spec.dim + self.spec.num_states
        return {
            "number": torch.tensor(number),
            "optimizer": torch.tensor(self.spec.optimizer.number),
            "ids": torch.from_numpy(ids[is_row]),
            "rows": torch.from_numpy(rows[:, :dim].copy()),
            "states": torch.from_numpy(rows[:, dim:end].copy()),
            "updates": torch.from_numpy(updates[is_row].astype(np.int64)),
            "candidates": torch.from_numpy(ids[~is_row]),
            "sightings": torch.from_numpy((places[~is_row] & CANDIDATE - 1).astype(np.int64)),
            "candidate_updates": torch.from_numpy(updates[~is_row].astype(np.int64)),
        }

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Restore the state of `snapshot`."""
        self._check_saved(saved)
        ids, candidates = saved["ids"].numpy(), saved["candidates"].numpy()
        sightings = saved["sightings"].numpy().astype(np.uint32) | np.uint32(CANDIDATE)
        columns = [
            np.concatenate([ids, candidates]),
            np.concatenate([np.zeros(len(ids), np.uint32), sightings]),
            np.concatenate([saved["updates"].numpy(), saved["candidate_updates"].numpy()]).astype(np.uint32),
        ]

        def fill(segment: Segment) -> None:
            addresses = [column.ctypes.data for column in columns]
            library.rows_fill(segment.address, int(saved["number"]), *addresses, len(columns[0]))
            rows, dim = self._rows(segment)[: len(ids)], self.spec.dim
            rows[:, :dim] = saved["rows"].numpy()
            rows[:, dim : dim + self.spec.num_states] = saved["states"].numpy()

        wanted = self._room._replace(rows=len(ids), candidates=len(candidates))
        self._replace(larger(self._room, wanted, self._most), fill)

    def __deepcopy__(self, memo: dict[int, Any]) -> RowTable:
        copy = RowTable(self.spec)
        copy.restore(self.snapshot())
        return copy

    # ---- regions of memory ----

    def _open(self, segment: Segment) -> None:
        found = library.rows_room(segment.address, segment.num_bytes)
        if found is None or found[:2] != self._most[:2]:
            raise CheckpointMismatch(f"The memory of {self._about} contains another table, or none.")
        self.recovered = bool(library.rows_recover(segment.address))
        self._room, self._segment = TableCapacity(*found), segment

    def _replace(self, room: TableCapacity, fill: Callable[[Segment], None]) -> None:
        """Move to a new region. The old one is valid until the register names the new one."""
        generation, before = self._generation + 1, self._segment
        where = _WHERE.pack(generation, room.num_bytes)
        segment = open_region(self.spec, self._memory, where)[1]
        memory = np.frombuffer(segment.buffer, np.uint8)
        if memory[:_PAGE].any():  # a process was killed while filling it
            memory[:] = 0
        library.rows_format(segment.address, tuple(room))
        fill(segment)
        self._register.write(where)
        self._room, self._segment, self._generation = room, segment, generation
        if generation > 1:
            before.free()
            before.close()

    def _grow(self, room: TableCapacity) -> None:
        before = self._address
        self._replace(room, lambda segment: library.rows_move(before, segment.address))

    def _rows(self, segment: Segment) -> Any:
        """The rows as floats: weights, optimizer state, padding."""
        stride = library.rows_stride(self.spec.dim, self.spec.num_states)
        room, offset = library.rows_room(segment.address, segment.num_bytes), library.rows_offset(segment.address)
        flat = np.frombuffer(segment.buffer, np.float32, count=room[2] * stride, offset=offset)
        return flat.reshape(-1, stride)

    # ---- what is refused ----

    @property
    def _about(self) -> str:
        return f"table {self.spec.name!r} of dimension {self.spec.dim}"

    def _refusal(self, failed: int, number: int) -> Exception:
        if failed == library.ROWS_TWICE:
            return DataError(f"An id occurs twice in update {number} of {self._about}.", fix=["rows.unique(ids)"])
        if failed == library.NO_MEMORY:
            return MemoryError(f"no memory for update {number} of {self._about}")
        return DataError(f"Update {number} comes after update {self.number} of {self._about}: numbers must ascend.")

    def _too_small(self, count: int) -> SpecError:
        return SpecError(
            f"One update of {self._about} touches {count} ids, but max_bytes={self.spec.max_bytes} has space for "
            f"{self._most.rows} rows{_in_each(self._parts)}.",
            where="max_bytes",
            fix=[f"max_bytes={self.spec.max_bytes * -(-2 * count // self._most.rows)}" if self.spec.max_bytes else ""],
        )

    def _check_saved(self, saved: Mapping[str, Tensor]) -> None:
        kind, rows, states = int(saved["optimizer"]), saved["rows"], saved["states"]
        expected = (self.spec.optimizer.number, (self.spec.dim,), (self.spec.num_states,))
        if (kind, rows.shape[1:], states.shape[1:]) != expected:
            names = {one.number: one.__name__ for one in OPTIMIZERS}
            raise CheckpointMismatch(
                f"The saved rows have dimension {rows.shape[1]} and the states of {names.get(kind)}; this is "
                f"{self._about}, {names[expected[0]]}.",
                fix=["the layer that they were saved from"],
            )
        if len(rows) > self._most.rows or len(saved["candidates"]) > self._most.candidates:
            raise CheckpointMismatch(
                f"{len(rows)} rows were saved; {self._about} has space for {self._most.rows}.",
                fix=["max_bytes as it was", "no max_bytes"],
            )


def unique(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The different ids, grouped by part (see `in_parts`), and for each of `ids` the index of its id among them."""
    flat = _flat_ids(ids)
    different, inverse = torch.empty_like(flat), torch.empty_like(flat)
    count = library.unique(flat.data_ptr(), len(flat), different.data_ptr(), inverse.data_ptr())
    return different[:count], inverse.view(ids.shape)


def in_parts(ids: Tensor) -> tuple[bool, list[int]]:
    """Whether ids are grouped by part, in order, and if so where each part begins; at the end, the number of ids."""
    found: tuple[bool, list[int]] = library.part_bounds(ids.data_ptr(), len(ids))
    return found


def first_places(inverse: Tensor, count: int) -> Tensor:
    """For each of `count` different ids, the index of its first appearance among the ids of `inverse`."""
    first = torch.empty(count, dtype=torch.int64)
    library.first_places(inverse.data_ptr(), inverse.numel(), first.data_ptr())
    return first


def repeat_rows_(rows: Tensor, inverse: Tensor, first: Tensor) -> None:
    """Copy each id's row from its first appearance to all its others. All tensors are contiguous."""
    if len(first) < inverse.numel():
        at = inverse.data_ptr(), first.data_ptr()
        library.repeat_rows(rows.data_ptr(), *at, inverse.numel(), rows.shape[-1])


def add_rows(values: Tensor, inverse: Tensor, count: int) -> Tensor:
    """`count` sums of the rows of `values`, each row added in order to the sum that `inverse` names."""
    values, inverse = values.contiguous(), inverse.reshape(-1)
    total = torch.zeros(count, values.shape[1])
    library.add_rows(total.data_ptr(), values.data_ptr(), inverse.data_ptr(), len(values), values.shape[1])
    return total


def _flat_ids(ids: Tensor) -> Tensor:
    return ids.detach().reshape(-1).to("cpu", torch.int64).contiguous()
