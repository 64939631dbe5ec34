"""What a chain means under a seed: each stage as a view (read by position) or, where that cannot be, as a stream.

Promise: the elements of an epoch and their order are a function of (chain, seed, epoch). The number of a stage, counted
from the sources, keys what it draws, so adding a stage at the end changes nothing below it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from manyhands.data.pipeline import stages as st
from manyhands.data.pipeline import streams, views
from manyhands.data.pipeline.elements import Element, Keyed, stacked
from manyhands.data.pipeline.leaves import open_leaf
from manyhands.data.pipeline.padding import padded
from manyhands.data.pipeline.streams import Stream
from manyhands.data.pipeline.views import View
from manyhands.data.randomness import randomness
from manyhands.data.sample_order import mix_all
from manyhands.data.sources.file_index import FileIndex
from manyhands.errors import DataError

__all__ = ["Binding"]

# One key for each kind of draw.
_MAP, _SHUFFLE, _GIVEN_SEED, _GENERATOR, _INNER = 201, 202, 203, 204, 205
_MAX_INTERLEAVED = 100_000


class Binding:
    """A chain under a seed. Views and what caches keep live as long as this object; `stages` are opened when needed."""

    def __init__(self, stage: st.Stage, seed: int, index: FileIndex | None = None) -> None:
        self.stage, self._seed, self._index = stage, seed, FileIndex() if index is None else index
        self._numbers: dict[int, int] = {}
        for one in st.walk(stage):
            self._numbers.setdefault(id(one), len(self._numbers))
        self._views: dict[int, View | None] = {}
        self._kept: dict[int, list[Element]] = {}

    def view(self, stage: st.Stage) -> View | None:
        """The stage by position; None if it can only be read forward."""
        number = self._numbers[id(stage)]
        if number not in self._views:
            self._views[number] = self._make_view(stage)
        return self._views[number]

    def paths(self) -> Iterator[str]:
        """The files whose rows are counted by opening them, those in an interleave of plain elements included."""
        for stage in st.walk(self.stage):
            if isinstance(stage, st.FilesStage) and stage.kind == "rows":
                yield from stage.paths
            elif isinstance(stage, st.InterleaveStage) and not _has_files(stage.child):
                child = self.view(stage.child)
                inner = InnerChains(stage.function, self._inner_seed(stage), self._index)
                if child is not None and child.length <= _MAX_INTERLEAVED:
                    for element in _elements(child):
                        yield from inner.paths(element)

    def stream(self, stage: st.Stage, epoch: int) -> Stream:
        """The stage read forward, from the beginning of an epoch."""
        view = self.view(stage)
        return self._open(stage, epoch) if view is None else streams.of_view(view, epoch)

    def _make_view(self, stage: st.Stage) -> View | None:
        if isinstance(stage, st.ColumnsStage | st.RangeStage | st.NamesStage | st.FilesStage):
            return views.LeafView(open_leaf(stage, self._index))
        if isinstance(stage, st.GeneratorStage | st.FilterStage | st.UnbatchStage):
            return None
        below = [self.view(child) for child in st.children(stage)]
        found = [view for view in below if view is not None]
        return self._view_on(stage, found) if len(found) == len(below) else None

    def _view_on(self, stage: st.Stage, below: list[View]) -> View | None:
        child, length = below[0], below[0].length
        match stage:
            case st.MapStage():
                return views.MappedView(child, self._keyed(stage.function, stage))
            case st.ShuffleStage():
                if length == views.ENDLESS:
                    return None
                return views.ShuffledView(child, stage.buffer, self._shuffle_key(stage), stage.every_epoch)
            case st.BatchStage() | st.PaddedBatchStage():
                return views.BatchedView(child, stage.size, stage.drop_remainder, collate_of(stage))
            case st.RepeatStage():
                return views.RepeatedView(child, stage.count)
            case st.TakeStage():
                return views.StridedView(child, 0, 1, length if stage.count is None else min(length, stage.count))
            case st.SkipStage():
                skipped = length if stage.count is None else min(length, stage.count)
                left = length if length == views.ENDLESS and stage.count is not None else length - skipped
                return views.StridedView(child, skipped, 1, left)
            case st.ShardStage():
                left = length if length == views.ENDLESS else len(range(stage.index, length, stage.num_shards))
                return views.StridedView(child, stage.index, stage.num_shards, left)
            case st.ZipStage():
                return views.ZippedView(below, stage.names)
            case st.ConcatenateStage():
                return views.ConcatenatedView(*below)
            case st.InterleaveStage():
                return self._interleaved(stage, child)
            case st.CacheStage():
                return views.CachedView(child)
            case st.PrefetchStage():
                return child
            case st.EnumerateStage():
                return views.EnumeratedView(child, stage.start)
            case _:
                raise AssertionError(type(stage).__name__)

    def _interleaved(self, stage: st.InterleaveStage, child: View) -> View | None:
        """By position if every data set can be read so; all of them are opened for their lengths."""
        if child.length > _MAX_INTERLEAVED:
            return None
        inner = InnerChains(stage.function, self._inner_seed(stage), self._index)
        if any(inner.endless_or_stream(element) for element in _elements(child)):
            return None
        return views.InterleavedView(child, inner, stage.cycle, stage.block)

    def _open(self, stage: st.Stage, epoch: int) -> Stream:
        match stage:
            case st.GeneratorStage():
                key = self._key(_GENERATOR, stage)
                return streams.generated(stage.function, stage.args, stage.takes_epoch, key, epoch)
            case st.FilterStage():
                predicate, view = self._keyed(stage.predicate, stage), self.view(stage.child)
                if view is not None:
                    return streams.filtered_view(view, predicate, epoch)
                return streams.filtered(self.stream(stage.child, epoch), predicate, epoch)
            case st.ZipStage():
                return streams.zipped_streams([self.stream(one, epoch) for one in stage.children], stage.names)
            case st.ConcatenateStage():
                return self._chained(stage, epoch)
            case st.RepeatStage():
                return streams.repeated(functools.partial(self.stream, stage.child), stage.count, epoch)
            case st.CacheStage():
                kept = self._kept.setdefault(self._numbers[id(stage)], [])
                return streams.cached(functools.partial(self.stream, stage.child), kept)
            case _:
                return self._on_stream(stage, self.stream(st.children(stage)[0], epoch), epoch)

    def _on_stream(self, stage: st.Stage, child: Stream, epoch: int) -> Stream:
        match stage:
            case st.MapStage():
                return streams.mapped(child, self._keyed(stage.function, stage), epoch)
            case st.ShuffleStage():
                if stage.buffer is None:
                    raise no_full_shuffle()
                own = epoch if stage.every_epoch else 0
                return streams.shuffled(child, stage.buffer, mix_all(self._shuffle_key(stage), own))
            case st.BatchStage() | st.PaddedBatchStage():
                return streams.batched(child, stage.size, stage.drop_remainder, collate_of(stage))
            case st.UnbatchStage():
                return streams.unbatched(child)
            case st.TakeStage():
                return child if stage.count is None else islice(child, stage.count)
            case st.SkipStage():
                return iter(()) if stage.count is None else islice(child, stage.count, None)
            case st.ShardStage():
                return streams.sharded(child, stage.num_shards, stage.index)
            case st.InterleaveStage():
                inner = InnerChains(stage.function, self._inner_seed(stage), self._index)
                opened = (inner.stream(pending.element(), epoch) for pending in child)
                return streams.interleaved(opened, stage.cycle, stage.block)
            case st.PrefetchStage():
                return child
            case st.EnumerateStage():
                return streams.enumerated(child, stage.start)
            case _:
                raise AssertionError(type(stage).__name__)

    def _chained(self, stage: st.ConcatenateStage, epoch: int) -> Stream:
        for number, one in enumerate((stage.first, stage.second)):
            yield from streams.salted(self.stream(one, epoch), number)

    def _keyed(self, function: Callable[..., Any], stage: st.Stage) -> Keyed:
        return Keyed(function, mix_all(self._seed, _MAP), self._numbers[id(stage)])

    def _key(self, kind: int, stage: st.Stage) -> int:
        return mix_all(self._seed, kind, self._numbers[id(stage)])

    def _shuffle_key(self, stage: st.ShuffleStage) -> int:
        # Two chains that are shuffled with the same seed stay in step, wherever they are.
        return self._key(_SHUFFLE, stage) if stage.seed is None else mix_all(self._seed, _GIVEN_SEED, stage.seed)

    def _inner_seed(self, stage: st.InterleaveStage) -> int:
        return self._key(_INNER, stage)


class InnerChains:
    """The chains that the function of an `interleave` makes, one for each example; each has another seed."""

    def __init__(self, function: Callable[..., Any], seed: int, index: FileIndex) -> None:
        self._function, self._seed, self._index = function, seed, index
        self._made: dict[tuple[int, str | int] | None, Binding] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": {}}

    def __call__(self, element: Element) -> View:
        binding = self._of(element)
        view = binding.view(binding.stage)
        assert view is not None
        return view

    def paths(self, element: Element) -> Iterator[str]:
        return self._of(element).paths()

    def endless_or_stream(self, element: Element) -> bool:
        binding = self._of(element)
        view = binding.view(binding.stage)
        return view is None or view.length == views.ENDLESS

    def stream(self, element: Element, epoch: int) -> Stream:
        binding = self._of(element)
        return streams.salted(binding.stream(binding.stage, epoch), element.example)

    def _of(self, element: Element) -> Binding:
        value, example = element
        # A data set depends on the element's value; a tensor has none that could be compared cheaply.
        key = (example, value) if isinstance(value, str | int) else None
        binding = self._made.get(key)
        if binding is None:
            with randomness(mix_all(self._seed, example) >> 1):  # what it draws is the same on every worker
                made = self._function(*value) if isinstance(value, tuple) else self._function(value)
            stage = getattr(made, "stage", None)
            if not isinstance(stage, st.Stage):
                raise DataError(
                    f"The function of interleave returned a {type(made).__name__}.",
                    where="interleave",
                    fix=["a function that returns an mh.Dataset, such as mh.Dataset.from_files"],
                )
            if st.has_batches(stage):
                raise DataError(
                    "The function of interleave returned a Dataset of batches, of which no step could be made.",
                    where="interleave",
                    fix=["batch() after interleave()", ".unbatch() at the end of what the function returns"],
                )
            binding = Binding(stage, mix_all(self._seed, example), self._index)
            if key is not None:
                self._made[key] = binding
        return binding


def _has_files(stage: st.Stage) -> bool:
    return any(isinstance(one, st.FilesStage | st.InterleaveStage) for one in st.walk(stage))


def _elements(view: View) -> Iterator[Element]:
    return iter(view.get(np.arange(view.length), 0))


def collate_of(stage: st.BatchStage | st.PaddedBatchStage) -> Callable[[list[Any]], Any]:
    if isinstance(stage, st.BatchStage):
        return stacked
    return functools.partial(padded, shapes=stage.shapes, fill=stage.values)


def no_full_shuffle() -> DataError:
    return DataError(
        'shuffle("full") needs to know how many elements there are, but what it shuffles can only be read forward, or '
        "has no end.",
        where="shuffle",
        fix=["shuffle(10_000): a buffer of that many elements", 'shuffle("full") before filter(...) or repeat()'],
    )
