"""Batches that are read once in each process: what was read ahead, or for a step that starts over, is kept.

A generator can be read only forward, and a pass over a PyDataset may change it at its end. So where the workers of a
run change, the steps that follow take up the pass where it is, instead of opening it again; and what a call of `fit`
has read ahead of its last step is the first that the next call reads. Start reading at `KeptStream` and `OneShot`.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor

from manyhands.errors import DataError

__all__ = ["KeptStream", "OneShot"]

KEPT = 4
"""Batches: that of the step, which may start over, the one after it, which is read to know whether it is there, and
two more, for a step that one worker has committed and another has not."""


class OneShot:
    """A generator, and how far this process has read it, in all calls that were given it."""

    _known: WeakKeyDictionary[Generator[Any, None, None], OneShot] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.num_read = 0
        self._last: deque[Any] = deque(maxlen=KEPT)
        self._ahead: deque[Any] = deque()

    @classmethod
    def of(cls, generator: types.GeneratorType[Any, Any, Any]) -> OneShot:
        return cls._known.setdefault(generator, cls())

    def items(self, generator: types.GeneratorType[Any, Any, Any]) -> Generator[Any, None, None]:
        """What is left of it; what was given back first."""
        while True:
            try:
                item = self._ahead.popleft() if self._ahead else next(generator)
            except StopIteration:
                return
            self.num_read += 1
            self._last.append(item)
            yield item

    def give_back(self, count: int) -> None:
        for _ in range(count):
            self._ahead.appendleft(self._last.pop())
        self.num_read -= count

    def read_until(self, generator: types.GeneratorType[Any, Any, Any], number: int) -> None:
        """Read and drop items, as an earlier attempt or the other workers did in a call that is over."""
        items = self.items(generator)
        while self.num_read < number and next(items, None) is not None:
            pass


class _Kept(NamedTuple):
    number: int
    """Of the pass, from 0."""
    start: int
    """The row of the pass that it begins with."""
    batch: tuple[Tensor, ...]
    num_read: int
    """Of a generator, up to this batch."""


class KeptStream:
    """A stream of batches for `StreamSource`, opened once per pass. `one_shot` if it comes from a generator."""

    def __init__(self, open_pass: Callable[[], Iterator[tuple[Tensor, ...]]], one_shot: OneShot | None) -> None:
        self._open_pass, self._one_shot = open_pass, one_shot
        self._next_epoch, self._epoch = 0, -1
        self._pass: Iterator[tuple[Tensor, ...]] = iter(())
        self._kept: deque[_Kept] = deque(maxlen=KEPT)
        self._num_batches = self._num_rows = 0

    def set_epoch(self, epoch: int) -> None:
        self._next_epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        self.close()
        self._epoch, self._pass = self._next_epoch, self._open_pass()
        self._kept.clear()
        self._num_batches = self._num_rows = 0
        return self._from(0)

    def from_row(self, epoch: int, row: int) -> tuple[Iterator[tuple[Tensor, ...]], int] | None:
        """The pass from this row on, and the number of batches before it. None: it is not open in this process."""
        if epoch != self._epoch:
            return None
        for index, start in [*((one.number, one.start) for one in self._kept), (self._num_batches, self._num_rows)]:
            if start == row:
                return self._from(index), index
        if self._one_shot is None:
            return None
        raise DataError(
            f"The generator is past row {row} of its pass, and can only be read forward.",
            where="fit(x=...)",
            fix=["a keras.utils.PyDataset, or arrays, which can be read again"],
        )

    def _from(self, index: int) -> Iterator[tuple[Tensor, ...]]:
        while True:
            kept = next((one for one in self._kept if one.number == index), None)
            if kept is None:
                batch = next(self._pass, None)
                if batch is None:
                    return
                num_read = self._one_shot.num_read if self._one_shot is not None else 0
                kept = _Kept(index, self._num_rows, batch, num_read)
                self._kept.append(kept)
                self._num_batches, self._num_rows = index + 1, self._num_rows + len(batch[0])
            yield kept.batch
            index += 1

    def batch_at(self, row: int) -> tuple[Tensor, ...] | None:
        """The batch that begins with this row, if it is kept."""
        return next((one.batch for one in self._kept if one.start == row), None)

    def end(self, epoch: int, row: int) -> None:
        """No step follows the one that ended before this row: give back what was read after it."""
        if self._one_shot is not None and epoch == self._epoch:
            used = [one for one in self._kept if one.start < row]
            if used:
                self._one_shot.give_back(self._one_shot.num_read - used[-1].num_read)
        self.close()

    def close(self) -> None:
        """End the pass, and threads or processes that read it."""
        close = getattr(self._pass, "close", None)
        if close is not None:
            close()
        self._epoch = -1
