"""Between layers whose rows lie in tables and whoever trains them: a strategy, a parameter server, a plain loop.

A layer asks its `RowSource` for the rows of a batch and hands them to torch as a leaf; what backward leaves there is
collected. `Sparse` is a model's layers together: `take` what a slice has left, and `apply` what all slices of a step
have, each as a list of `Contribution`s, which is all that ever travels. Sums go in the order of slices, so tables do
not depend on who computed which. Where rows live is the source's business: here, in this process.
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

__all__ = ["Contribution", "LocalRows", "RowLayer", "RowSource", "Sparse", "decode", "encode", "merge", "norm_of"]


class Contribution(NamedTuple):
    """What a slice, or a step, has for one table: different ids and the sum of each one's gradients."""

    table: str
    ids: Tensor
    gradients: Tensor


class RowSource(Protocol):
    """Who has the rows. Tables are made known by `open`; calls for one that is not are errors."""

    def open(self, spec: TableSpec) -> None: ...

    def lookup(self, table: str, ids: Tensor) -> Tensor:
        """Rows of different ids, in their order. Changes nothing, and counts nothing as seen."""
        ...

    def take(self, table: str, ids: Tensor, inverse: Tensor) -> Tensor:
        """The same, each wherever `inverse` has its place: what `unique` has told, on the CPU."""
        ...

    def apply(self, number: int, contributions: Sequence[Contribution], factor: float) -> None:
        """The step's contributions, one for each table that has any; gradients are to be multiplied by `factor`."""
        ...

    def state(self, table: str) -> dict[str, Tensor]:
        """For a checkpoint; empty where rows are saved elsewhere."""
        ...

    def restore(self, table: str, state: Mapping[str, Tensor]) -> None: ...

    def digests(self) -> list[int]:
        """Of what should be the same on every worker, or a part of it; empty where there is one copy."""
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

    def apply(self, number: int, contributions: Sequence[Contribution], factor: float) -> None:
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
    """What layers with rows have in common. The rows are not parameters: no optimizer of torch's knows them."""

    def __init__(self, spec: TableSpec, *, takes_seed: bool) -> None:
        super().__init__()
        self.spec, self._takes_seed = spec, takes_seed
        self._source: RowSource = LocalRows()
        self._calls = 0
        self._left: list[tuple[int, Tensor, Tensor]] = []
        self._is_hidden = False
        self._source.open(spec)

    @property
    def source(self) -> RowSource:
        return self._source

    def use(self, source: RowSource) -> None:
        """Rows are looked up there from now on."""
        source.open(self.spec)
        self._source = source

    def set_seed(self, seed: int) -> None:
        """Of a run, for layers that were not given one, before the first update."""
        if self._takes_seed and isinstance(self._source, LocalRows) and not self._source.tables[self.spec.name].number:
            self.spec = msgspec.structs.replace(self.spec, seed=seed)
            self._source.open(self.spec)

    def rows_of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the different ones of `ids`, on their device, and for each of `ids` which row is its own.

        Where gradients are computed, those of the rows are collected until `take`.
        """
        different, inverse = unique(ids)
        rows = self._source.lookup(self.spec.name, different).to(ids.device)
        if torch.is_grad_enabled():
            rows.requires_grad_()
            self._calls += 1
            number = self._calls

            def collect(leaf: Tensor) -> None:
                assert leaf.grad is not None
                self._left.append((number, different, leaf.grad))
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
            self._left.append((number, different, gradients))

        return taken(take, inverse, len(different), collect)

    def take(self) -> Contribution | None:
        """What backward has left since the last time, summed in the order of the calls of forward."""
        left, self._left, self._calls = sorted(self._left, key=lambda one: one[0]), [], 0
        found = merge([Contribution(self.spec.name, ids, gradients.cpu()) for _, ids, gradients in left])
        return found[0] if found else None

    def get_extra_state(self) -> dict[str, Tensor]:
        return {} if self._is_hidden else self._source.state(self.spec.name)

    def set_extra_state(self, state: Mapping[str, Tensor]) -> None:
        if state:
            self._source.restore(self.spec.name, state)


class Sparse:
    """All layers with rows that a model has; there may be none, and then nothing costs anything."""

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

    def use(self, source: RowSource) -> None:
        for layer in self.layers.values():
            layer.use(source)

    def set_seed(self, seed: int) -> None:
        for layer in self.layers.values():
            layer.set_seed(seed)

    @property
    def seeds(self) -> dict[str, int]:
        """By table: what rows begin with that have had no update."""
        return {name: layer.spec.seed for name, layer in self.layers.items()}

    def drop(self) -> None:
        """Whatever backward has left, of a step that does not count."""
        self.take()

    def take(self) -> list[Contribution]:
        """What backward has left since the last time: one for each table that was used."""
        return [found for layer in self.layers.values() if (found := layer.take()) is not None]

    def apply(self, number: int, contributions: Sequence[Contribution], factor: float) -> None:
        """A step's contributions, summed by `merge`, to where the rows are."""
        by_source: dict[int, list[Contribution]] = {}
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
        """Of what should be the same on every worker."""
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


def merge(contributions: Iterable[Contribution]) -> list[Contribution]:
    """One for each table, in the order of their first appearance: sums in the order given."""
    by_table: dict[str, list[Contribution]] = {}
    for one in contributions:
        by_table.setdefault(one.table, []).append(one)
    return [_sum(table, ones) for table, ones in by_table.items()]


def _sum(table: str, ones: Sequence[Contribution]) -> Contribution:
    if len(ones) == 1:
        return ones[0]
    ids, inverse = unique(torch.cat([one.ids for one in ones]))
    return Contribution(table, ids, add_rows(torch.cat([one.gradients for one in ones]), inverse, len(ids)))


def norm_of(contributions: Iterable[Contribution]) -> float:
    """Of all gradients together."""
    return math.sqrt(sum(float(one.gradients.double().pow(2).sum()) for one in contributions))


class _Header(msgspec.Struct, array_like=True):
    place: int
    table: str
    count: int
    dim: int


def encode(slices: Mapping[int, Sequence[Contribution]]) -> bytes:
    """Contributions by slice, as bytes."""
    ones = [(place, one) for place, found in slices.items() for one in found]
    headers = [_Header(place, one.table, len(one.ids), one.gradients.shape[1]) for place, one in ones]
    head = msgspec.msgpack.encode(headers)
    parts = [len(head).to_bytes(8, "little"), head]
    for _, one in ones:
        parts += [one.ids.numpy().tobytes(), one.gradients.contiguous().numpy().tobytes()]
    return b"".join(parts)


def decode(data: bytes) -> dict[int, list[Contribution]]:
    memory, start = bytearray(data), 8 + int.from_bytes(data[:8], "little")
    found: dict[int, list[Contribution]] = {}
    for header in msgspec.msgpack.decode(data[8:start], type=list[_Header]):
        ids, start = _read(memory, start, header.count, torch.int64)
        gradients, start = _read(memory, start, header.count * header.dim, torch.float32)
        one = Contribution(header.table, ids, gradients.view(header.count, header.dim))
        found.setdefault(header.place, []).append(one)
    return found


def _read(memory: bytearray, start: int, count: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    end = start + count * dtype.itemsize
    if not count:
        return torch.empty(0, dtype=dtype), end
    return torch.frombuffer(memory[start:end], dtype=dtype), end
