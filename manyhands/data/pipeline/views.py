"""Chains whose elements can be read by position, in any order: nothing before a position has to be read.

A view has a `length` and `get(positions, epoch)`. Views that only move positions (`MovedView`) say from where in which
other view each element is, so a run of them costs index arithmetic, and `locate` follows it down to the rows of one
source, which are then copied together. The order of an epoch is a function of (seed, epoch) wherever it is computed:
in a worker, in one of its loader processes, after a resume. `binding` makes views of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from manyhands.data.pipeline.elements import Element, Keyed, copied, stacked
from manyhands.data.pipeline.index_orders import buffered_order, interleaved_order
from manyhands.data.pipeline.leaves import Leaf
from manyhands.data.sample_order import Rows, mix_all, permuted
from manyhands.errors import DataError

__all__ = [
    "ENDLESS",
    "BatchForm",
    "BatchedView",
    "CachedView",
    "ConcatenatedView",
    "EnumeratedView",
    "InterleavedView",
    "LeafView",
    "MappedView",
    "MovedView",
    "RepeatedView",
    "ShuffledView",
    "StridedView",
    "View",
    "ViewPart",
    "ZippedView",
    "batch_of",
    "salted",
    "zipped",
]

ENDLESS = 2**62
"""The length of a chain that repeats without an end: more elements than a run can use."""
_ORDER_BLOCK = 32768


class BatchForm(NamedTuple):
    """Of batches: all have `size` rows, but the last one has `tail`, if that is not 0."""

    size: int
    tail: int


class View(Protocol):
    @property
    def length(self) -> int: ...

    @property
    def form(self) -> BatchForm | None:
        """If the elements are batches of one size; else None."""

    def rows_at(self, position: int, epoch: int) -> int | None:
        """How many rows a batch has, if that is known without computing it."""

    def get(self, positions: Rows, epoch: int) -> list[Element]:
        """The elements at these positions of an epoch."""


class ViewPart(NamedTuple):
    """Some of the requested elements, by their indices in the request, and where they are."""

    indices: Rows
    view: View
    positions: Rows
    epoch: int
    salt: int | None = None
    """Mixed into the example's number, where the same number may be that of another example."""


def salted(element: Element, salt: int) -> Element:
    """The same value as another example: which repetition of a `repeat`, which part of a `concatenate` it is of.

    The first one is salted, too: else the second of one step and the first of the next would have the same number.
    """
    return element._replace(example=mix_all(element.example, salt))


class LeafView:
    """The rows of a leaf."""

    form = None

    def __init__(self, leaf: Leaf) -> None:
        self.leaf, self.length = leaf, leaf.length

    def get(self, positions: Rows, epoch: int) -> list[Element]:
        return [Element(*pair) for pair in zip(self.leaf.values(positions), positions.tolist(), strict=True)]

    def rows_at(self, position: int, epoch: int) -> int | None:
        return None

    def locate(self, positions: Rows, epoch: int) -> tuple[Leaf, Rows] | None:
        return self.leaf, positions


class MovedView:
    """Elements of other views in another order. Subclasses have `length` and `parts`."""

    length: int
    form: BatchForm | None = None

    def parts(self, positions: Rows, epoch: int) -> Iterator[ViewPart]:
        raise NotImplementedError

    def get(self, positions: Rows, epoch: int) -> list[Element]:
        found: list[Any] = [None] * len(positions)
        for part in self.parts(positions, epoch):
            elements = part.view.get(part.positions, part.epoch)
            for index, element in zip(part.indices.tolist(), elements, strict=True):
                found[index] = element if part.salt is None else salted(element, part.salt)
        return found

    def rows_at(self, position: int, epoch: int) -> int | None:
        part = next(self.parts(np.array([position]), epoch))
        return part.view.rows_at(int(part.positions[0]), part.epoch)

    def locate(self, positions: Rows, epoch: int) -> tuple[Leaf, Rows] | None:
        """The leaf and its rows, if all of these elements are plain rows of one leaf."""
        rows, leaf = np.empty(len(positions), np.int64), None
        for part in self.parts(positions, epoch):
            below = getattr(part.view, "locate", None)
            found = below(part.positions, part.epoch) if below is not None else None
            if found is None or (leaf is not None and found[0] is not leaf):
                return None
            leaf, rows[part.indices] = found
        return None if leaf is None else (leaf, rows)


def _even(form: BatchForm | None) -> BatchForm | None:
    """The form of the same batches in any order."""
    return form if form is not None and not form.tail else None


def _all(positions: Rows) -> Rows:
    return np.arange(len(positions))


class StridedView(MovedView):
    """`take`, `skip` and `shard`: every `step`-th element from `first` on."""

    def __init__(self, child: View, first: int, step: int, length: int) -> None:
        self._child, self._first, self._step, self.length = child, first, step, length
        self.form = _even(child.form)
        if child.form is not None and step == 1:
            has_last = first + length == child.length
            self.form = child.form if has_last else BatchForm(child.form.size, 0)

    def parts(self, positions: Rows, epoch: int) -> Iterator[ViewPart]:
        yield ViewPart(_all(positions), self._child, self._first + positions * self._step, epoch)


class ShuffledView(MovedView):
    """`buffer` None: any order is as likely. Else the order of a shuffle buffer, computed for a whole epoch."""

    def __init__(self, child: View, buffer: int | None, key: int, every_epoch: bool) -> None:
        self._child, self.length, self._key, self._every_epoch = child, child.length, key, every_epoch
        self._buffer = None if buffer is None or buffer >= self.length else buffer
        self.form = _even(child.form)
        # Replaced as a whole: a prefetch thread uses it, too.
        self._known: tuple[int, int, Rows] = (-1, 0, np.empty(0, np.int64))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": (-1, 0, np.empty(0, np.int64))}

    def parts(self, positions: Rows, epoch: int) -> Iterator[ViewPart]:
        own = epoch if self._every_epoch else 0
        yield ViewPart(_all(positions), self._child, self._order(positions, own), epoch)

    def _order(self, positions: Rows, epoch: int) -> Rows:
        low, high = (int(positions.min()), int(positions.max()) + 1) if len(positions) else (0, 0)
        known, start, order = self._known
        if known != epoch or low < start or high > start + len(order):
            if self._buffer is not None:
                start, order = 0, buffered_order(self.length, self._buffer, mix_all(self._key, epoch))
            elif high - low > _ORDER_BLOCK:
                return permuted(self.length, self._key, epoch, positions)
            else:
                start, stop = low, min(self.length, max(high, low + _ORDER_BLOCK))
                order = permuted(self.length, self._key, epoch, np.arange(start, stop))
            self._known = epoch, start, order
        return order[positions - start]


class RepeatedView(MovedView):
    """Each repetition is an epoch of what it repeats, so it is shuffled anew."""

    def __init__(self, child: View, count: int | None) -> None:
        self._child, self._count = child, count
        self.length = ENDLESS if count is None and child.length else min(ENDLESS, child.length * (count or 0))
        self.form = child.form if count == 1 else _even(child.form)

    def parts(self, positions: Rows, epoch: int) -> Iterator[ViewPart]:
        repetitions, within = np.divmod(positions, self._child.length)
        for number in np.unique(repetitions).tolist():
            chosen = np.flatnonzero(repetitions == number)
            yield ViewPart(chosen, self._child, within[chosen], epoch * (self._count or 0) + number, salt=number)


class ConcatenatedView(MovedView):
    def __init__(self, first: View, second: View) -> None:
        self._both, self._edge = (first, second), first.length
        self.length = min(ENDLESS, first.length + second.length)
        if first.form is not None and second.form is not None and first.form == BatchForm(second.form.size, 0):
            self.form = second.form

    def parts(self, positions: Rows, epoch: int) -> Iterator[ViewPart]:
        is_second = positions >= self._edge
        for number, view in enumerate(self._both):
            chosen = np.flatnonzero(is_second == bool(number))
            if chosen.size:
                yield ViewPart(chosen, view, positions[chosen] - number * self._edge, epoch, salt=number)


class InterleavedView(MovedView):
    """Elements of the data sets that a function makes of the child's elements; `open_inner` keeps those it has made."""

    def __init__(self, child: View, open_inner: Callable[[Element], View], cycle: int, block: int) -> None:
        self._child, self._open, self._cycle, self._block = child, open_inner, cycle, block
        self._known: tuple[int, list[tuple[View, int]], Rows, Rows] | None = None
        self.length = len(self._of(0)[2])

    def parts(self, positions: Rows, epoch: int) -> Iterator[ViewPart]:
        inner, which, where = self._of(epoch)
        chosen_from = which[positions]
        for number in np.unique(chosen_from).tolist():
            view, example = inner[number]
            indices = np.flatnonzero(chosen_from == number)
            yield ViewPart(indices, view, where[positions[indices]], epoch, salt=example)

    def _of(self, epoch: int) -> tuple[list[tuple[View, int]], Rows, Rows]:
        known = self._known
        if known is None or known[0] != epoch:
            elements = self._child.get(np.arange(self._child.length), epoch)
            inner = [(self._open(element), element.example) for element in elements]
            order = interleaved_order([view.length for view, _ in inner], self._cycle, self._block)
            if known is not None and len(order[0]) != len(known[2]):
                raise DataError(
                    f"interleave has {len(known[2])} elements in one epoch and {len(order[0])} in another.",
                    where="interleave",
                    fix=["a function that makes the same data sets in every epoch"],
                )
            self._known = known = (epoch, inner, *order)
        return known[1:]


class ZippedView:
    def __init__(self, views: list[View], names: tuple[str, ...] | None) -> None:
        self._views, self._names, self.length = views, names, min(view.length for view in views)
        alike = len({(view.form, view.length) for view in views}) == 1
        self.form: BatchForm | None = views[0].form if alike else None

    def get(self, positions: Rows, epoch: int) -> list[Element]:
        columns = [view.get(positions, epoch) for view in self._views]
        return [zipped(elements, self._names) for elements in zip(*columns, strict=True)]

    def rows_at(self, position: int, epoch: int) -> int | None:
        return self._views[0].rows_at(position, epoch)


def zipped(elements: tuple[Element, ...], names: tuple[str, ...] | None) -> Element:
    """One element of a `zip`."""
    values = tuple(element.value for element in elements)
    value = values if names is None else dict(zip(names, values, strict=True))
    return Element(value, mix_all(*(element.example for element in elements)))


class EnumeratedView:
    form = None

    def __init__(self, child: View, start: int) -> None:
        self._child, self._start, self.length = child, start, child.length

    def get(self, positions: Rows, epoch: int) -> list[Element]:
        elements = self._child.get(positions, epoch)
        pairs = zip(positions.tolist(), elements, strict=True)
        return [Element((self._start + position, value), example) for position, (value, example) in pairs]

    def rows_at(self, position: int, epoch: int) -> int | None:
        return None


class MappedView:
    def __init__(self, child: View, function: Keyed) -> None:
        self._child, self._function, self.length, self.form = child, function, child.length, child.form

    def get(self, positions: Rows, epoch: int) -> list[Element]:
        elements = self._child.get(positions, epoch)
        results = self._function.each(elements, epoch)
        return [Element(value, element.example) for value, element in zip(results, elements, strict=True)]

    def rows_at(self, position: int, epoch: int) -> int | None:
        return self._child.rows_at(position, epoch)


class BatchedView:
    """Batches of a view, each an element."""

    def __init__(self, child: View, size: int, drop_remainder: bool, collate: Callable[[list[Any]], Any]) -> None:
        self.child, self.size, self._collate = child, size, collate
        if child.length == ENDLESS:
            self.length, tail = ENDLESS, 0
        else:
            self.length = child.length // size if drop_remainder else -(-child.length // size)
            tail = 0 if drop_remainder else child.length % size
        self.form: BatchForm | None = BatchForm(size, tail)

    def rows_at(self, position: int, epoch: int) -> int | None:
        return min(self.size, self.child.length - position * self.size)

    def get(self, positions: Rows, epoch: int) -> list[Element]:
        return [Element(self._batch(position, epoch), position) for position in positions.tolist()]

    def _batch(self, number: int, epoch: int) -> Any:
        start = number * self.size
        return batch_of(self.child, np.arange(start, min(start + self.size, self.child.length)), epoch, self._collate)


def batch_of(view: View, positions: Rows, epoch: int, collate: Callable[[list[Any]], Any] = stacked) -> Any:
    """These elements as a batch; rows of one leaf are read together."""
    locate = getattr(view, "locate", None)
    found = locate(positions, epoch) if locate is not None and collate is stacked else None
    if found is not None:
        leaf, rows = found
        return leaf.take(rows)
    return collate([element.value for element in view.get(positions, epoch)])


class CachedView:
    """Elements as in the first epoch, each computed once in this process."""

    def __init__(self, child: View) -> None:
        self._child, self.length, self.form = child, child.length, child.form
        self._kept: dict[int, Element] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    def get(self, positions: Rows, epoch: int) -> list[Element]:
        lacking = [position for position in dict.fromkeys(positions.tolist()) if position not in self._kept]
        if lacking:
            self._kept.update(zip(lacking, self._child.get(np.array(lacking), 0), strict=True))
        kept = [self._kept[position] for position in positions.tolist()]
        return [Element(copied(element.value), element.example) for element in kept]

    def rows_at(self, position: int, epoch: int) -> int | None:
        return self._child.rows_at(position, 0)
