"""Data with row numbers: tensors and arrays, map-style datasets, and anything with `__getitem__` and `__len__`.

A reader takes row numbers and returns a collated batch; `RowSource` says which thread may call it. Readers are sent to
loader processes, so they are plain objects, never closures. `as_source.as_source` recognises the kinds of data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from manyhands.data.custom_orders import Order
from manyhands.data.fetchers import SliceRequest
from manyhands.data.row_exchange import RowExchange
from manyhands.data.sources.columns import collate_columns, collate_rows
from manyhands.errors import DataError

__all__ = ["Collate", "DatasetReader", "Reader", "RowSource"]

Collate = Callable[[list[Any]], Any]
Rows = npt.NDArray[np.int64]


class Reader(Protocol):
    @property
    def num_rows(self) -> int: ...

    def take(self, rows: Rows) -> Any: ...


class RowSource:
    """Rows by number, or a contiguous part of them. `take(rows)` returns a collated batch.

    `fetched_by` says which thread calls it: a prefetch "thread" (no user code runs, no random numbers are drawn), the
    "caller" of the step with the slice's seed set, or, for rows in "memory", the caller without a seed: copying them
    costs less than a thread that competes with the step for the same cores. With `num_workers` above 0, loader
    processes call it.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        fetched_by: Literal["memory", "thread", "caller"],
        num_workers: int = 0,
        shuffle: bool = True,
        bounds: tuple[int, int] | None = None,
    ) -> None:
        self.reader, self.fetched_by, self.num_workers, self.shuffle = reader, fetched_by, num_workers, shuffle
        self.first, stop = bounds if bounds is not None else (0, reader.num_rows)
        self.num_rows = stop - self.first
        self.loader_batch_size: int | None = None
        """The batch size of the DataLoader that was passed, for a `fit` without one."""
        self.loader_timeout_s: float | None = None
        """How long to wait for a slice from a loader process; None: for ever."""
        self.own_batch_size: int | None = None
        """The size of the batches that the data makes itself, so that no other can be asked for."""
        self.endless = False
        """Whether it repeats without an end, so that a run counts steps and not epochs."""
        self.order: Order | None = None
        """Which rows an epoch uses, if not each row once."""
        self.kept_loader: Any = None
        """Loader processes of the last evaluation, for the next one; they end with this object."""

    def close(self) -> None:
        """End the kept loader processes."""
        self.kept_loader = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "kept_loader": None, "order": None}  # a loader process receives row numbers

    @property
    def num_positions(self) -> int:
        """Number of rows in an epoch."""
        return self.num_rows if self.order is None else self.order.num_positions()

    def take(self, rows: Rows) -> Any:
        return self.reader.take(rows + self.first if self.first else rows)

    def take_job(self, job: SliceRequest) -> Any:
        return self.take(job.rows)

    @property
    def shared(self) -> bool:
        """Whether a worker lacks some of the rows, so that workers must exchange them."""
        return not getattr(self.reader, "complete", True)

    def take_together(self, wanted: list[list[Rows]], exchange: RowExchange, name: str) -> list[Callable[[], Any]]:
        """See `FileRows.take_together`."""
        assert self.shared
        moved = [[rows + self.first for rows in lists] for lists in wanted]
        batches: list[Callable[[], Any]] = self.reader.take_together(moved, exchange, name)  # type: ignore[attr-defined]
        return batches

    def part(self, start: int, stop: int) -> RowSource:
        """Rows [start, stop) as a separate source."""
        part = RowSource(
            self.reader,
            fetched_by=self.fetched_by,
            num_workers=self.num_workers,
            shuffle=self.shuffle,
            bounds=(self.first + start, self.first + stop),
        )
        part.loader_batch_size, part.loader_timeout_s = self.loader_batch_size, self.loader_timeout_s
        part.order = None if self.order is None else self.order.part(start, stop)
        return part

    def sample(self, rows: int, seed: int) -> RowSource:
        """A random subset of `rows` rows: the same for every caller with the same seed."""
        if self.endless:
            raise DataError(
                "train_metrics draws from the rows of an epoch, but the data repeats without an end.",
                fix=["no repeat() at the end of the Dataset", "no train_metrics="],
            )
        drawn = np.random.default_rng(seed).permutation(self.num_rows)[:rows]
        reader = ChosenRows(self.reader, np.sort(drawn) + self.first)
        return RowSource(reader, fetched_by=self.fetched_by, num_workers=self.num_workers, shuffle=False)


class ChosenRows:
    """Some of another reader's rows, in the order given."""

    def __init__(self, reader: Reader, rows: Rows) -> None:
        self._reader, self._rows, self.num_rows = reader, rows, len(rows)

    def take(self, rows: Rows) -> Any:
        return self._reader.take(self._rows[rows])


class DatasetReader:
    """A map-style dataset. Rows are read together if it supports that, else one by one."""

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self.dataset, self._collate = dataset, collate
        try:
            self.num_rows = len(dataset)
        except TypeError as error:
            raise DataError(
                f"{type(dataset).__name__} has __getitem__ but no length ({error}).",
                fix=["give it __len__", "a torch IterableDataset, or a generator function, for a stream"],
            ) from None

    def take(self, rows: Rows) -> Any:
        numbers = rows.tolist()
        if self._collate is None and is_table(self.dataset):
            return collate_columns(self.dataset[numbers])
        if hasattr(self.dataset, "__getitems__"):
            examples = self.dataset.__getitems__(numbers)
        else:
            examples = [self._one(number) for number in numbers]
        return collate_rows(examples) if self._collate is None else self._collate(examples)

    def _one(self, number: int) -> Any:
        try:
            return self.dataset[number]
        except Exception as error:
            error.add_note(f"while reading row {number}")
            raise


def is_table(data: object) -> bool:
    """Whether `data[[0, 1]]` returns a dict of columns, as a Hugging Face Dataset does."""
    return all(hasattr(data, name) for name in ("column_names", "features", "__getitems__"))
