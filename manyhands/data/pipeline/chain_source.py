"""A chain as data of a run: rows by number wherever the chain allows it, else a stream.

By number (`RowSource`): position p of epoch e is requested as row e * length + p, so a loader process can compute any
example from the request alone. Where the chain makes batches of one size, rows are counted within batches: with
nothing after `batch`, each slice reads its own rows only; with a map after `batch`, a worker computes the batches in
which it has a slice. The rest is a stream of examples, or of batches that differ in size, and a resumed run reads it
again up to its position. Start reading at `source_of`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import torch

from manyhands.data.data_agreement import RowSample, agree, sample_of
from manyhands.data.fetchers import SliceRequest
from manyhands.data.pipeline import stages as st
from manyhands.data.pipeline.binding import Binding, collate_of
from manyhands.data.pipeline.elements import same_rows, stacked, structure
from manyhands.data.pipeline.leaves import is_in_memory
from manyhands.data.pipeline.streams import PendingElement, Stream
from manyhands.data.pipeline.views import ENDLESS, BatchForm, View, batch_of
from manyhands.data.ready_batches import cut_rows, num_rows_of
from manyhands.data.row_exchange import RowExchange
from manyhands.data.sample_order import Rows
from manyhands.data.sources.file_index import FileIndex
from manyhands.data.sources.row_source import Collate, RowSource
from manyhands.data.sources.stream_source import StreamSource
from manyhands.errors import DataError

__all__ = ["AUTOTUNE", "ChainOrder", "ChainStream", "source_of"]

AUTOTUNE = -1
_KEPT_BATCHES = 2


def source_of(
    chain: st.Stage,
    *,
    seed: int,
    collate: Collate | None = None,
    num_workers: int | None = None,
    batched: bool | None = None,
    workers: int = 1,
    exchange: RowExchange | None = None,
) -> RowSource | StreamSource:
    """The chain under a run's seed. `num_workers`: loader processes, if not as its maps say; `workers`: of the run.

    With an exchange the workers, who all call this, compare their chains and divide what must be read to count rows.
    """
    identity, (stage, is_endless) = st.describe(chain), _without_ends(chain)
    _check_batched(stage, batched, collate)
    if exchange is not None:
        tables = [one.table for one in st.walk(chain) if isinstance(one, st.ColumnsStage)]
        values = [column for table in tables for column in sample_of(table).values]
        agree(exchange, f"Dataset {identity}", None, RowSample(values=values))
    index = FileIndex()
    if exchange is not None:
        index.share(list(dict.fromkeys(Binding(stage, seed, index).paths())), exchange)
    processes = _processes(chain, workers) if num_workers is None else num_workers
    by_number = not batched or st.has_batches(stage)
    source: RowSource | StreamSource | None = None
    if by_number:
        source = _rows(stage, seed, collate, processes, identity, index)
    if source is None:
        source = _stream(stage, seed, collate, processes, bool(batched) or st.has_batches(stage), identity, index)
    source.endless = source.endless or is_endless
    return source


def _without_ends(stage: st.Stage) -> tuple[st.Stage, bool]:
    """Without `prefetch` and an endless `repeat` at its end, whose repetitions are epochs; and whether it had one."""
    is_endless = False
    while isinstance(stage, st.PrefetchStage) or (isinstance(stage, st.RepeatStage) and stage.count is None):
        is_endless = is_endless or isinstance(stage, st.RepeatStage)
        stage = stage.child
    return stage, is_endless


def _check_batched(stage: st.Stage, batched: bool | None, collate: Collate | None) -> None:
    if not st.has_batches(stage):
        return
    if batched is False:
        raise DataError(
            "batched=False is for data of examples, but the elements of this Dataset are batches.",
            fix=["no batched=", ".unbatch() at the end of the chain"],
        )
    if collate is not None:
        raise DataError(
            "collate makes a batch of examples, but this Dataset makes its batches itself.",
            fix=["no collate=", "no batch() in the chain, and batch_size=32 with collate="],
        )


def _processes(stage: st.Stage, workers: int) -> int:
    """How many loader processes the maps of a chain request."""
    asked = {one.processes for one in st.walk(stage) if isinstance(one, st.MapStage)}
    if max(asked, default=0) > 0 or AUTOTUNE not in asked:
        return max(asked, default=0)
    own = [function for one in st.walk(stage) for function in (_function_of(one),) if function is not None]
    hidden = [function for function in own if not _is_importable(function)]
    if hidden:
        name = getattr(hidden[0], "__qualname__", type(hidden[0]).__name__)
        warnings.warn(
            f"num_parallel_calls=AUTOTUNE: {name} cannot be imported by a loader process, so the worker itself calls "
            "it. A function at the top level of a module can be sent.",
            stacklevel=6,
        )
        return 0
    return max(1, len(os.sched_getaffinity(0)) // workers) if hasattr(os, "sched_getaffinity") else 1


def _function_of(stage: st.Stage) -> Callable[..., Any] | None:
    return getattr(stage, "function", None) or getattr(stage, "predicate", None)


def _is_importable(function: Any) -> bool:
    inner = getattr(function, "func", None)  # a functools.partial
    if inner is not None:
        return _is_importable(inner)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return "<" not in name


def _rows(
    stage: st.Stage, seed: int, collate: Collate | None, processes: int, identity: str, index: FileIndex
) -> RowSource | None:
    """None if it can only be read forward, or its batches differ in size."""
    size = None
    if isinstance(stage, st.BatchStage) or (isinstance(stage, st.PaddedBatchStage) and _is_fixed(stage.shapes)):
        # A slice is collated alone, as its padding does not depend on the other slices.
        size, collate, drops, stage = stage.size, collate_of(stage), stage.drop_remainder, stage.child
        view = Binding(stage, seed, index).view(stage)
        if view is None:
            return None
        length = view.length // size * size if drops and view.length < ENDLESS else view.length
        reader: ExampleReader | BatchReader = ExampleReader(view, length, collate)
    else:
        view = Binding(stage, seed, index).view(stage)
        if view is None:
            return None
        form = view.form if st.has_batches(stage) else None
        if form is None and st.has_batches(stage):
            return None
        size = None if form is None else form.size
        reader = ExampleReader(view, view.length, collate or stacked) if form is None else BatchReader(view, form)
    calls = any(_function_of(one) is not None for one in st.walk(stage)) or collate not in (None, stacked)
    in_memory = all(is_in_memory(one) for one in st.walk(stage) if not st.children(one))
    kind = "caller" if calls else "memory" if in_memory else "thread"
    source = RowSource(reader, fetched_by=kind, num_workers=processes)  # type: ignore[arg-type]
    source.order, source.own_batch_size = ChainOrder(identity, reader.num_rows), size
    source.loader_batch_size, source.endless = size, reader.num_rows >= ENDLESS
    return source


def _is_fixed(shapes: Any) -> bool:
    """Whether padded shapes leave nothing to the longest element."""
    if isinstance(shapes, dict):
        return all(_is_fixed(shape) for shape in shapes.values())
    if isinstance(shapes, tuple | list):
        return all(isinstance(size, int) or _is_fixed(size) for size in shapes)
    return False


class ChainOrder:
    """The order of a chain: row e * length + p is position p of epoch e, and the chain says which example that is."""

    def __init__(self, identity: str, length: int) -> None:
        self._identity, self._length = identity, length

    def num_positions(self) -> int:
        return self._length

    def rows(self, batch_size: int, seed: int, epoch: int, start: int, stop: int) -> Rows:
        return np.arange(start, stop) + epoch * self._length

    def part(self, start: int, stop: int) -> ChainOrder:
        raise DataError(
            "validation_split divides data by row number, but a Dataset decides its order itself.",
            fix=["validation=data.take(1000), and data.skip(1000) to train on, both before any shuffle"],
        )

    def check(self, num_rows: int) -> None:
        assert num_rows == self._length

    def identity(self, batch_size: int = 0) -> str:
        return self._identity

    def describe(self) -> str:
        return "in the order of their Dataset"


class ExampleReader:
    """Examples of a view."""

    def __init__(self, view: View, length: int, collate: Callable[[list[Any]], Any]) -> None:
        self._view, self.num_rows, self._collate = view, length, collate

    def take(self, rows: Rows) -> Any:
        epochs, positions = np.divmod(rows, self.num_rows)
        found = np.unique(epochs).tolist()
        if len(found) == 1:
            return batch_of(self._view, positions, found[0], self._collate)
        parts = [self._view.get(positions[epochs == epoch], epoch) for epoch in found]  # requests are in order
        return self._collate([element.value for element in chain.from_iterable(parts)])


class BatchReader:
    """Rows within the batches of a view, which have one size. The last batches are kept, as slices share them."""

    def __init__(self, view: View, form: BatchForm) -> None:
        self._view, self._form = view, form
        self.num_rows = view.length * form.size - (form.size - form.tail if form.tail and view.length else 0)
        self.num_rows = min(ENDLESS, self.num_rows)
        self._kept: dict[tuple[int, int], Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    def take(self, rows: Rows) -> Any:
        epochs, positions = np.divmod(rows, self.num_rows)
        numbers, within = np.divmod(positions, self._form.size)
        edges = np.flatnonzero((np.diff(numbers) != 0) | (np.diff(epochs) != 0) | (np.diff(within) != 1)) + 1
        pieces = [
            cut_rows(self._batch(int(numbers[low]), int(epochs[low])), int(within[low]), int(within[high - 1]) + 1)
            for low, high in zip([0, *edges.tolist()], [*edges.tolist(), len(rows)], strict=True)
        ]
        return pieces[0] if len(pieces) == 1 else joined(pieces)

    def _batch(self, number: int, epoch: int) -> Any:
        batch = self._kept.get((number, epoch))
        if batch is None:
            batch = self._view.get(np.array([number]), epoch)[0].value
            size = self._view.rows_at(number, epoch)
            same_rows(batch, num_rows_of(batch), self._form.size if size is None else size)
            # Replaced as a whole: a prefetch thread uses it, too.
            self._kept = {**dict(list(self._kept.items())[1 - _KEPT_BATCHES :]), (number, epoch): batch}
        return batch


def joined(pieces: list[Any]) -> Any:
    """Rows of several batches as one."""
    return structure(lambda *leaves: _join(leaves), *pieces)


def _join(leaves: tuple[Any, ...]) -> Any:
    if isinstance(leaves[0], list):
        return list(chain.from_iterable(leaves))
    if len({tuple(leaf.shape[1:]) for leaf in leaves}) > 1:
        raise DataError(
            "Rows of several batches were asked for at once, and these batches differ in shape.",
            fix=["no batch_size= beside a Dataset that makes batches"],
        )
    return torch.cat(leaves)


def _stream(
    stage: st.Stage, seed: int, collate: Collate | None, processes: int, batched: bool, identity: str, index: FileIndex
) -> StreamSource:
    size, group = None, None
    if isinstance(stage, st.BatchStage) or (isinstance(stage, st.PaddedBatchStage) and _is_fixed(stage.shapes)):
        # As above, a slice of a batch needs its own examples only.
        size, collate, batched = stage.size, collate_of(stage), False
        group, stage = (size if stage.drop_remainder else None), stage.child
    if processes > 1:
        warnings.warn(f"{identity}: a stream is read by one loader process, not by {processes}.", stacklevel=5)
    source = ChainStream(stage, seed, collate or stacked, min(1, processes), batched, group, index)
    source.identity, source.own_batch_size, source.loader_batch_size = identity, size, size
    return source


class ChainStream(StreamSource):
    """A chain that is read forward. Its items are pending elements, which are computed in the slices that need them."""

    def __init__(
        self,
        stage: st.Stage,
        seed: int,
        collate: Callable[[list[Any]], Any],
        processes: int,
        batched: bool,
        group: int | None,
        index: FileIndex,
    ) -> None:
        super().__init__(stage, collate, num_workers=processes, batched=batched)
        self._stage, self._seed, self._group, self._index = stage, seed, group, index
        self._binding: Binding | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_binding": None}  # what is open stays here

    def open(self, epoch: int) -> Stream:
        if self._binding is None:
            self._binding = Binding(self._stage, self._seed, self._index)
        stream = self._binding.stream(self._stage, epoch)
        return stream if self._group is None else _whole_groups(stream, self._group)

    def collate(self, rows: list[Any]) -> Any:
        return super().collate([pending.value() for pending in rows])

    def collate_job(self, items: list[Any], job: SliceRequest) -> Any:
        return self.slice_job(items, 0, self.count(items), job)

    def slice_job(self, items: list[Any], low: int, high: int, _job: SliceRequest) -> Any:
        if not self.batched:
            return self.collate(items[low:high])
        batch = items[0].value()
        return cut_rows(same_rows(batch, num_rows_of(batch), self.count(items)), low, high)

    def count(self, items: list[Any]) -> int:
        if not self.batched:
            return len(items)
        pending: PendingElement = items[0]
        return num_rows_of(pending.value()) if pending.rows is None else pending.rows

    def check_first(self, item: Any) -> None:
        pass  # the chain says whether its elements are batches


def _whole_groups(stream: Stream, size: int) -> Iterator[PendingElement]:
    """Without the elements of a last batch that is not full."""
    while len(group := list(islice(stream, size))) == size:
        yield from group
