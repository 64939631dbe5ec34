"""Connects layers with embedding rows to what trains them: a strategy, a parameter server, or a plain loop.

A layer gets the rows of a batch from its `EmbeddingRowSource` and passes them to torch as a leaf; the gradients of the
leaf are collected. `Sparse` is all such layers of a model: `take` the gradients of a slice, and `apply` those of all
slices of a step, each as a list of `TableGradient`s, the only data that is sent. Sums are in slice order, so tables do
not depend on which rank computed which slice. The source decides where rows are stored; `LocalRows`: in this process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhands.embedding.row_autograd import taken
from manyhands.embedding.row_optimizers import TableSpec
from manyhands.embedding.row_table import RowTable, add_rows, unique
from manyhands.errors import SpecError

__all__ = [
    "EmbeddingRowSource",
    "LocalRows",
    "RowLayer",
    "Sparse",
    "TableGradient",
    "decode",
    "encode",
    "merge",
    "norm_of",
]


class TableGradient(NamedTuple):
    """The gradient of a slice, or a step, for one table: different ids and the sum of each one's gradients."""

    table: str
    ids: Tensor
    gradients: Tensor


class EmbeddingRowSource(Protocol):
    """Stores the rows. `open` registers a table; calls for one that is not registered are errors."""

    def open(self, spec: TableSpec) -> None: ...

    def lookup(self, table: str, ids: Tensor) -> Tensor:
        """Rows of different ids, in the given order. Changes nothing, and does not count the ids as seen."""
        ...

    def take(self, table: str, ids: Tensor, inverse: Tensor) -> Tensor:
        """The same, with row i at every index where `inverse` is i: `ids` and `inverse` from `unique`, on the CPU."""
        ...

    def apply(self, number: int, contributions: Sequence[TableGradient], factor: float) -> None:
        """Apply the step's gradients, one entry for each table that has any; they are multiplied by `factor`."""
        ...

    def state(self, table: str) -> dict[str, Tensor]:
        """For a checkpoint; empty if rows are saved elsewhere."""
        ...

    def restore(self, table: str, state: Mapping[str, Tensor]) -> None: ...

    def digests(self) -> list[int]:
        """Digests of what should be equal on every worker, or of a part of it; empty if there is only one copy."""
        ...


class LocalRows:
    """Tables in the memory of this process."""

    def __init__(self) -> None:
        self.tables: dict[str, RowTable] = {}

    def open(self, spec: TableSpec) -> None:
        known = self.tables.get(spec.name)
        if known is None or known.spec != spec:
            self.tables[spec.name] = RowTable(spec)

    def lookup(self, table: str, ids: Tensor) -> Tensor:
        return self.tables[table].lookup(ids)

    def take(self, table: str, ids: Tensor, inverse: Tensor) -> Tensor:
        return functional.embedding(inverse, self.lookup(table, ids))

    def apply(self, number: int, contributions: Sequence[TableGradient], factor: float) -> None:
        for name, ids, gradients in contributions:
            table = self.tables[name]
            table.update(max(number, table.number + 1), ids, gradients, factor=factor)

    def state(self, table: str) -> dict[str, Tensor]:
        return self.tables[table].snapshot()

    def restore(self, table: str, state: Mapping[str, Tensor]) -> None:
        self.tables[table].restore(state)

    def digests(self) -> list[int]:
        return [table.digest() for table in self.tables.values()]


class RowLayer(nn.Module):
    """Base of layers with embedding rows. The rows are not parameters: torch optimizers do not see them."""

    def __init__(self, spec: TableSpec, *, takes_seed: bool) -> None:
        super().__init__()
        self.spec, self._takes_seed = spec, takes_seed
        self._source: EmbeddingRowSource = LocalRows()
        self._calls = 0
        self._gradients: list[tuple[int, Tensor, Tensor]] = []
        self._is_hidden = False
        self._source.open(spec)

    @property
    def source(self) -> EmbeddingRowSource:
        return self._source

    def use(self, source: EmbeddingRowSource) -> None:
        """Look rows up in `source` from now on."""
        source.open(self.spec)
        self._source = source

    def set_seed(self, seed: int) -> None:
        """Set the seed of the first training that has this layer, unless it has its own, or has rows with updates.

        Later trainings do not change it: whether the first one took a step in this process may not matter, as a worker
        that joins later takes none.
        """
        if self._takes_seed and isinstance(self._source, LocalRows) and not self._source.tables[self.spec.name].number:
            self.spec = msgspec.structs.replace(self.spec, seed=seed)
            self._source.open(self.spec)
        self._takes_seed = False

    def rows_of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the different ids, on their device, and for each of `ids` the index of its row.

        If gradients are enabled, those of the rows are collected until `take`.
        """
        different, inverse = unique(ids)
        rows = self._source.lookup(self.spec.name, different).to(ids.device)
        if torch.is_grad_enabled():
            rows.requires_grad_()
            self._calls += 1
            number = self._calls

            def collect(leaf: Tensor) -> None:
                assert leaf.grad is not None
                self._gradients.append((number, different, leaf.grad))
                leaf.grad = None

            rows.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]
        return rows, inverse.to(ids.device)

    def rows_at(self, ids: Tensor) -> Tensor:
        """The row of each of `ids`, on their device: one dimension more. Gradients are collected as for `rows_of`."""
        if ids.device.type != "cpu":
            rows, inverse = self.rows_of(ids)
            return functional.embedding(inverse, rows)
        different, inverse = unique(ids)

        def take() -> Tensor:
            return self._source.take(self.spec.name, different, inverse)

        if not torch.is_grad_enabled():
            return take()
        self._calls += 1
        number = self._calls

        def collect(gradients: Tensor) -> None:
            self._gradients.append((number, different, gradients))

        return taken(take, inverse, len(different), collect)

    def take(self) -> TableGradient | None:
        """The gradients since the last call, summed in the order of the calls of forward."""
        gradients_by_call, self._gradients, self._calls = sorted(self._gradients, key=lambda one: one[0]), [], 0
        found = merge([TableGradient(self.spec.name, ids, gradients.cpu()) for _, ids, gradients in gradients_by_call])
        return found[0] if found else None

    def get_extra_state(self) -> dict[str, Tensor]:
        return {} if self._is_hidden else self._source.state(self.spec.name)

    def set_extra_state(self, state: Mapping[str, Tensor]) -> None:
        if state:
            self._source.restore(self.spec.name, state)


class Sparse:
    """All layers of a model that have embedding rows; without any, calls cost nothing."""

    def __init__(self, model: nn.Module) -> None:
        self.layers: dict[str, RowLayer] = {}
        for module in model.modules():
            if isinstance(module, RowLayer) and self.layers.setdefault(module.spec.name, module) is not module:
                raise SpecError(
                    f"Two layers have a table of the name {module.spec.name!r}.",
                    fix=["another name", "the same layer object in both places, to share its rows"],
                )

    def __bool__(self) -> bool:
        return bool(self.layers)

    def use(self, source: EmbeddingRowSource) -> None:
        for layer in self.layers.values():
            layer.use(source)

    def set_seed(self, seed: int) -> None:
        for layer in self.layers.values():
            layer.set_seed(seed)

    @property
    def seeds(self) -> dict[str, int]:
        """By table: the seed of the initial weights of rows without an update."""
        return {name: layer.spec.seed for name, layer in self.layers.items()}

    def drop(self) -> None:
        """Drop the collected gradients, of a step that does not count."""
        self.take()

    def take(self) -> list[TableGradient]:
        """The gradients since the last call: one entry for each table that was used."""
        return [found for layer in self.layers.values() if (found := layer.take()) is not None]

    def apply(self, number: int, contributions: Sequence[TableGradient], factor: float) -> None:
        """Apply a step's gradients, summed by `merge`, in each table's source."""
        by_source: dict[int, list[TableGradient]] = {}
        sources = {id(layer.source): layer.source for layer in self.layers.values()}
        for one in contributions:
            by_source.setdefault(id(self.layers[one.table].source), []).append(one)
        for key, ones in by_source.items():
            sources[key].apply(number, ones, factor)

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {name: layer.get_extra_state() for name, layer in self.layers.items()}

    def restore(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        for name, layer in self.layers.items():
            layer.set_extra_state(state[name])

    def digests(self) -> list[int]:
        """Digests of what should be equal on every worker."""
        sources = {id(layer.source): layer.source for layer in self.layers.values()}
        return [one for source in sources.values() for one in source.digests()]

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Inside, `model.state_dict()` copies no rows."""
        for layer in self.layers.values():
            layer._is_hidden = True
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer._is_hidden = False


def merge(contributions: Iterable[TableGradient]) -> list[TableGradient]:
    """One entry for each table, in the order of first appearance; sums in the given order."""
    by_table: dict[str, list[TableGradient]] = {}
    for one in contributions:
        by_table.setdefault(one.table, []).append(one)
    return [_sum(table, ones) for table, ones in by_table.items()]


def _sum(table: str, ones: Sequence[TableGradient]) -> TableGradient:
    if len(ones) == 1:
        return ones[0]
    ids, inverse = unique(torch.cat([one.ids for one in ones]))
    return TableGradient(table, ids, add_rows(torch.cat([one.gradients for one in ones]), inverse, len(ids)))


def norm_of(contributions: Iterable[TableGradient]) -> float:
    """The norm of all gradients together."""
    return math.sqrt(sum(float(one.gradients.double().pow(2).sum()) for one in contributions))


class _Header(msgspec.Struct, array_like=True):
    place: int
    table: str
    count: int
    dim: int


def encode(slices: Mapping[int, Sequence[TableGradient]]) -> bytes:
    """Gradients by slice, as bytes."""
    ones = [(place, one) for place, found in slices.items() for one in found]
    headers = [_Header(place, one.table, len(one.ids), one.gradients.shape[1]) for place, one in ones]
    header_bytes = msgspec.msgpack.encode(headers)
    parts = [len(header_bytes).to_bytes(8, "little"), header_bytes]
    for _, one in ones:
        parts += [one.ids.numpy().tobytes(), one.gradients.contiguous().numpy().tobytes()]
    return b"".join(parts)


def decode(data: bytes) -> dict[int, list[TableGradient]]:
    memory, start = bytearray(data), 8 + int.from_bytes(data[:8], "little")
    found: dict[int, list[TableGradient]] = {}
    for header in msgspec.msgpack.decode(data[8:start], type=list[_Header]):
        ids, start = _read(memory, start, header.count, torch.int64)
        gradients, start = _read(memory, start, header.count * header.dim, torch.float32)
        one = TableGradient(header.table, ids, gradients.view(header.count, header.dim))
        found.setdefault(header.place, []).append(one)
    return found


def _read(memory: bytearray, start: int, count: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    end = start + count * dtype.itemsize
    if not count:
        return torch.empty(0, dtype=dtype), end
    return torch.frombuffer(memory[start:end], dtype=dtype), end
