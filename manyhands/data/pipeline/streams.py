"""Chains that can only be read forward, because the data decides what follows: `filter`, `unbatch`, generators.

A stream yields `PendingElement` elements: what a stage has to know is computed when that stage needs it, the rest when
its value is used. So every worker runs the filter and the stages below it on all elements, but maps above the
filter run only for the worker's own slices, and a resumed run passes over elements without computing what it can spare.
Start reading at `PendingElement`; `binding.Binding.stream` opens the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import numpy as np

from manyhands.data.pipeline import views
from manyhands.data.pipeline.elements import Element, Keyed, copied, row_of, stacked
from manyhands.data.pipeline.index_orders import draws
from manyhands.data.pipeline.views import View, zipped
from manyhands.data.randomness import randomness
from manyhands.data.ready_batches import num_rows_of
from manyhands.data.sample_order import mix_all
from manyhands.errors import DataError

__all__ = [
    "PendingElement",
    "Stream",
    "batched",
    "cached",
    "enumerated",
    "filtered",
    "filtered_view",
    "generated",
    "interleaved",
    "mapped",
    "of_view",
    "repeated",
    "salted",
    "sharded",
    "shuffled",
    "unbatched",
    "zipped_streams",
]

_READ_TOGETHER = 64


class PendingElement:
    """An element that is computed at most once, when it is needed. `rows`: how many a batch has, if that is known."""

    __slots__ = ("_compute", "_element", "rows")

    def __init__(self, compute: Callable[[], Element], rows: int | None = None) -> None:
        self._compute: Callable[[], Element] | None = compute
        self._element: Element | None = None
        self.rows = rows

    def element(self) -> Element:
        if self._compute is not None:
            self._element, self._compute = self._compute(), None  # and so drops what it was computed of
        assert self._element is not None
        return self._element

    def value(self) -> Any:
        return self.element().value


Stream = Iterator[PendingElement]


def known(value: Any, example: int) -> PendingElement:
    return PendingElement(lambda: Element(value, example))


def of_view(view: View, epoch: int) -> Stream:
    def at(position: int) -> PendingElement:
        return PendingElement(lambda: view.get(np.array([position]), epoch)[0], view.rows_at(position, epoch))

    return (at(position) for position in range(view.length))


def generated(function: Callable[..., Any], args: tuple[Any, ...], takes_epoch: bool, key: int, epoch: int) -> Stream:
    """What a generator function yields; what it draws for an element depends on (seed, epoch, element) only."""
    iterator: Iterator[Any] | None = None
    for number in count():
        with randomness(mix_all(key, epoch, number) >> 1):
            if iterator is None:
                iterator = iter(function(*args, epoch=epoch) if takes_epoch else function(*args))
            try:
                value = next(iterator)
            except StopIteration:
                return
        yield known(copied(value), number)  # a generator may fill one array again and again


def mapped(child: Stream, function: Keyed, epoch: int) -> Stream:
    def apply(pending: PendingElement) -> PendingElement:
        def compute() -> Element:
            element = pending.element()
            return Element(function(element, epoch), element.example)

        return PendingElement(compute, pending.rows)

    return (apply(pending) for pending in child)


def filtered(child: Stream, predicate: Keyed, epoch: int) -> Stream:
    return (pending for pending in child if bool(predicate(pending.element(), epoch)))


def filtered_view(view: View, predicate: Keyed, epoch: int) -> Stream:
    """The same over a view, whose elements are read many at a time."""
    for start in range(0, view.length, _READ_TOGETHER):
        elements = view.get(np.arange(start, min(view.length, start + _READ_TOGETHER)), epoch)
        for element, keep in zip(elements, predicate.each(elements, epoch), strict=True):
            if bool(keep):
                yield known(*element)


def shuffled(child: Stream, buffer: int, key: int) -> Stream:
    """As `index_orders.buffered_order` does for positions."""
    held, numbers = list(islice(child, buffer)), draws(key)
    while held:
        place = next(numbers) % len(held)
        yield held[place]
        following = next(child, None)
        if following is not None:
            held[place] = following
        else:
            held[place] = held[-1]
            held.pop()


def salted(child: Stream, salt: int) -> Stream:
    """The same elements, as other examples: `views.salted`."""

    def renamed(pending: PendingElement) -> PendingElement:
        return PendingElement(lambda: views.salted(pending.element(), salt), pending.rows)

    return (renamed(pending) for pending in child)


def repeated(open_child: Callable[[int], Stream], times: int | None, epoch: int) -> Stream:
    for number in count() if times is None else range(times):
        is_empty = True
        for pending in salted(open_child(epoch * (times or 0) + number), number):
            is_empty = False
            yield pending
        if is_empty and times is None:
            raise DataError(
                f"repeat() has no end, and repetition {number + 1} of what it repeats has no elements.",
                where="repeat",
                fix=["a filter that keeps some elements", "repeat(count)"],
            )


def sharded(child: Stream, num_shards: int, index: int) -> Stream:
    return islice(child, index, None, num_shards)


def zipped_streams(streams: list[Stream], names: tuple[str, ...] | None) -> Stream:
    def both(pendings: tuple[PendingElement, ...]) -> PendingElement:
        return PendingElement(lambda: zipped(tuple(pending.element() for pending in pendings), names))

    return (both(pendings) for pendings in zip(*streams, strict=False))


def enumerated(child: Stream, start: int) -> Stream:
    def numbered(number: int, pending: PendingElement) -> PendingElement:
        def compute() -> Element:
            value, example = pending.element()
            return Element((number, value), example)

        return PendingElement(compute)

    return (numbered(number, pending) for number, pending in enumerate(child, start))


def batched(child: Stream, size: int, drop_remainder: bool, collate: Callable[[list[Any]], Any] = stacked) -> Stream:
    def together(pendings: list[PendingElement], number: int) -> PendingElement:
        return PendingElement(lambda: Element(collate([one.value() for one in pendings]), number), len(pendings))

    for number in count():
        pendings = list(islice(child, size))
        if not pendings or (drop_remainder and len(pendings) < size):
            return
        yield together(pendings, number)


def unbatched(child: Stream) -> Stream:
    for pending in child:
        value, example = pending.element()
        for row in range(num_rows_of(value)):
            yield known(row_of(value, row), mix_all(example, row))


def interleaved(inner: Iterator[Stream], cycle: int, block: int) -> Stream:
    """As `index_orders.interleaved_order`, for streams, whose lengths are not known."""
    places: list[Stream | None] = [None] * cycle
    has_more, place = True, 0
    while has_more or any(one is not None for one in places):
        if places[place] is None and has_more:
            places[place] = next(inner, None)
            has_more = places[place] is not None
        stream = places[place]
        if stream is not None:
            taken = 0
            for pending in islice(stream, block):
                taken += 1
                yield pending
            if taken < block:
                places[place] = None
        place = (place + 1) % cycle


def cached(open_child: Callable[[int], Stream], kept: list[Element]) -> Stream:
    """The stream as in the first epoch; it is kept when it has been read to its end."""
    if kept:
        yield from (known(copied(value), example) for value, example in kept)
        return
    reading: list[Element] = []
    for pending in open_child(0):
        element = pending.element()
        reading.append(element)
        yield known(copied(element.value), element.example)
    kept[:] = reading
