"""The data arguments of Keras's `fit`, `evaluate` and `predict`, for steps of all workers.

Keras's own adapters read the arguments, so types, batch sizes and complaints are Keras's. Arrays become rows, which
workers divide; generators, PyDatasets and DataLoaders become a stream of whole batches, which every worker reads;
what Keras does not know (a torch Dataset, our datasets) goes to manyhands as it is. Start reading at `FitData`.
"""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_data_adapter, array_slicing
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import NUM_BATCHES_FOR_TENSOR_SPEC as PEEKED
from torch import Tensor

from manyhands.compat.keras.kept_stream import KeptStream, OneShot
from manyhands.errors import DataError
from manyhands.training.driven_training import whole_batches

__all__ = ["FitData", "StepAdapter", "is_keras_data", "split_off"]

USUAL_BATCH = 32
"""Keras's default."""


def split_off(x: Any, y: Any, sample_weight: Any, fraction: float) -> tuple[tuple[Any, Any, Any], tuple[Any, ...]]:
    """(x, y, sample_weight) for training, and the same of the last `fraction` for validation, as Keras splits them."""
    training, validation = array_slicing.train_validation_split((x, y, sample_weight), validation_split=fraction)
    return training, validation


def is_keras_data(x: Any) -> bool:
    """Whether Keras knows how to read it."""
    if array_data_adapter.can_convert_arrays((x,)) or isinstance(x, keras.utils.PyDataset | types.GeneratorType):
        return True
    return data_adapters.is_torch_dataloader(x) or isinstance(x, DataAdapter)


class FitData:
    """One set of data. `batch_size` is that of the global batch; None where the data comes in batches."""

    def __init__(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int | None = None,
        steps: int | None = None,
        shuffle: Any = False,
        class_weight: Any = None,
    ) -> None:
        self._generator = x if isinstance(x, types.GeneratorType) else None
        self._one_shot = OneShot.of(x) if self._generator is not None else None
        self._read_before = self._one_shot.num_read if self._one_shot is not None else 0
        x = self._one_shot.items(x) if self._one_shot is not None else x
        self._x, self._structure, self.shuffle = x, None, bool(shuffle) and shuffle != "batch"
        self._steps = steps
        self._columns: tuple[Tensor, ...] | None = None
        self._adapter: Any = None
        self._kept: KeptStream | None = None
        self.num_batches: int | None = None
        self.batch_size: int | None = None
        self.is_stream = False
        """Whether every worker reads all of it, so that what it reads, and where it ends, may differ between them."""
        if not is_keras_data(x):
            _refuse_with_dataset(x, y=y, sample_weight=sample_weight, class_weight=class_weight)
            self.batch_size = batch_size
            return
        with _with_threads(x):
            self._adapter = data_adapters.get_data_adapter(
                x,
                y,
                sample_weight,
                batch_size=batch_size,
                steps_per_epoch=steps,
                shuffle=shuffle,
                class_weight=class_weight,
            )
        self.num_batches = self._adapter.num_batches
        if isinstance(self._adapter, data_adapters.ArrayDataAdapter):
            self._read_columns()
        else:
            self.is_stream = True
            self._kept = KeptStream(self._stream, self._one_shot)

    def _read_columns(self) -> None:
        self.batch_size = self._adapter.batch_size
        with keras.device("cpu"):  # batches are moved to the worker's device, not the whole data
            whole = self._adapter.get_torch_dataloader().dataset.__getitems__(slice(None))
        self._columns = self._flat(whole)

    def know_source(self, source: Any) -> None:
        """For data that Keras does not know: its number of batches, and the rows of one."""
        if self._adapter is not None:
            return
        if getattr(source, "batched", None):
            self.is_stream = True
            return
        self.batch_size = self.batch_size or getattr(source, "loader_batch_size", None) or USUAL_BATCH
        if source.num_rows is not None and not source.endless:
            self.num_batches = -(-source.num_rows // self.batch_size)
        self.is_stream = self.num_batches is None

    @property
    def is_known_everywhere(self) -> bool:
        """Whether it has rows with numbers, which were compared, and a length."""
        return self._columns is not None

    # ---- training ----

    def for_source(self) -> Any:
        """What a source of steps is made from; its batches are `restored` afterwards."""
        if self._columns is not None:
            return self._columns
        return self._x if self._kept is None else self._kept

    @property
    def batched(self) -> bool | None:
        """Whether each item of it is a whole batch."""
        return True if self._adapter is not None and self._columns is None else None

    def batch_at(self, row: int) -> tuple[Tensor, ...] | None:
        """The batch that begins with this row of the pass, of a stream that Keras reads."""
        return None if self._kept is None else self._kept.batch_at(row)

    def end_steps(self, epoch: int, row: int) -> None:
        """The next step would begin there: a generator continues with it in the next call."""
        if self._kept is not None:
            self._kept.end(epoch, row)

    # ---- generators, which a later call, maybe of another process, continues ----

    @property
    def num_read(self) -> int:
        """How many batches of a generator this call has read."""
        return self._one_shot.num_read - self._read_before if self._one_shot is not None else 0

    def read_over(self, count: int | None) -> None:
        """Read as many as the call did that is over; None: to the end."""
        if self._generator is not None and self._one_shot is not None:
            until = sys.maxsize if count is None else self._read_before + count
            self._one_shot.read_until(self._generator, until)

    def read_over_evaluation(self, steps: int | None) -> None:
        self.read_over(None if steps is None else max(steps, PEEKED))

    def _stream(self) -> Iterator[tuple[Tensor, ...]]:
        """One pass over the batches. The adapters of PyDatasets and generators count passes themselves."""
        self._adapter.on_epoch_begin()
        try:
            for batch in self._adapter.get_torch_dataloader():
                yield self._flat(batch)
        finally:
            self._adapter.on_epoch_end()

    def _flat(self, batch: Any) -> tuple[Tensor, ...]:
        batch = tuple(batch) if isinstance(batch, list) else batch if isinstance(batch, tuple) else (batch,)
        self._structure = keras.tree.map_structure(lambda one: one is None, batch)
        return tuple(one for one in keras.tree.flatten(batch) if one is not None)

    def restored(self, batch: Any) -> Any:
        """A batch, or some rows of it, in the structure that the user gave: x, y and weights."""
        if self._structure is None:
            return batch
        left = iter(batch)
        return keras.tree.map_structure(lambda is_none: None if is_none else next(left), self._structure)

    # ---- evaluation, and the first batch, from which Keras builds what is not built yet ----

    def batches(self, limit: int | None = None) -> Iterator[Callable[[int, int], Any]]:
        """Every batch in order, once: a function of two row numbers that returns those rows of it.

        Of a Dataset that repeats without an end as many as are asked for.
        """
        if self._columns is not None:
            assert self.batch_size is not None
            rows = len(self._columns[0])
            for start in range(0, rows, self.batch_size):
                yield _Rows(self, [one[start : start + self.batch_size] for one in self._columns])
        elif self._adapter is not None:
            for columns in self._stream():
                yield _Rows(self, list(columns))
        else:
            for batch in whole_batches(self._x, self.batch_size or USUAL_BATCH, limit=limit or self._steps):
                yield _Rows(None, tuple(batch) if isinstance(batch, list) else batch)

    def first_batch(self) -> Any:
        """For building the model: reading it does not use up a generator."""
        first = getattr(self._adapter, "_first_batches", None)
        if first:
            return first[0]
        if isinstance(self._x, keras.utils.PyDataset):
            return self._adapter._standardize_batch(self._x[0])
        found = next(self.batches(1))
        return found(0, len(found))  # type: ignore[arg-type]


@contextmanager
def _with_threads(x: Any) -> Iterator[None]:
    """Inside, Keras's adapter of a PyDataset reads with threads, of which the user asked for as many processes.

    Keras forks them, and a fork of a process in which torch has started threads can hang.
    """
    if not (isinstance(x, keras.utils.PyDataset) and x.use_multiprocessing):
        yield
        return
    warnings.warn(
        "PyDataset(use_multiprocessing=True): threads read it instead, as many. Keras would fork the worker, and a "
        "fork of a process with torch's threads can hang. mh.Dataset reads in processes of its own.",
        stacklevel=5,
    )
    x.use_multiprocessing = False
    try:
        yield
    finally:
        x.use_multiprocessing = True


class _Rows:
    """A whole batch, of which rows are taken."""

    def __init__(self, data: FitData | None, batch: Any) -> None:
        self._data, self._batch = data, batch

    def __len__(self) -> int:
        return int(next(one.shape[0] for one in keras.tree.flatten(self._batch) if one is not None))

    @property
    def columns(self) -> list[Tensor]:
        return [one for one in keras.tree.flatten(self._batch) if isinstance(one, Tensor)]

    def __call__(self, low: int, high: int) -> Any:
        cut = keras.tree.map_structure(lambda one: None if one is None else one[low:high], self._batch)
        return cut if self._data is None else self._data.restored(cut)


class StepAdapter(DataAdapter):  # type: ignore[misc]  # keras has no types
    """What Keras's loop gets in place of data: an item for each step. `start` begins one pass over the data."""

    def __init__(self, start: Callable[[], Iterator[Any]], num_batches: int | None, batch_size: int | None) -> None:
        self._start, self._num_batches, self._batch_size = start, num_batches, batch_size

    def get_torch_dataloader(self) -> Iterator[Any]:
        return self._start()

    @property
    def num_batches(self) -> int | None:
        return self._num_batches

    @property
    def batch_size(self) -> int | None:
        return self._batch_size


def _refuse_with_dataset(x: Any, **given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise DataError(
                f"{name} was given with a {type(x).__name__}, whose items have everything.",
                fix=[f"items (x, y{', sample_weight' if 'weight' in name else ''}), and no {name}="],
            )
