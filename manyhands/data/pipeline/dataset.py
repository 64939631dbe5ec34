"""`mh.Dataset`: chains as in tf.data. Each method returns a new Dataset; nothing is read before the data is used.

As a user types it:

    train = (
        mh.Dataset.from_files("pictures/train")              # pairs of picture and label
        .shuffle("full")
        .map(augment, num_parallel_calls=2)                  # in two loader processes per worker
        .batch(64)                                           # the global batch
    )
    trainer.fit(train, epochs=3)

A chain is a frozen value: a tree of small structs, sources and stages (`stages`). Reading it has two forms.

*By position* (`views`). Tensors and files have rows by number, and shuffle, repeat, take, skip, shard, zip,
concatenate, enumerate, batch, padded_batch, map, cache and interleave keep that: which example is at a position is
arithmetic on (seed, epoch, position), a buffered shuffle and an interleave included, as these order indices, not data.
Such a chain becomes a `RowSource`, like tensors and map-style datasets: a worker reads the rows of its slices and no
others, loader processes compute any slice, parameter servers lease slices, and a run resumes, grows and shrinks at any
step.

*Forward* (`streams`). After `from_generator`, `filter`, `unbatch`, or an interleave of these, the data decides what
comes next. Such a chain becomes a `StreamSource`: every worker runs the filter and what is below it on all elements;
maps above run for the worker's own slices only. It resumes at its position by passing over what was used. Batches that
differ in size within an epoch, such as those of batch(B).repeat(2) if B does not divide, are a stream, too, though
nothing is read to pass over them.

Randomness inside `map` is keyed by (seed, stage, epoch, example), never by worker, process or position, so it is the
same for any number of workers and loader processes. A repetition is an epoch of what it repeats.

What cannot be resumed or reproduced is refused by name: an iterator that can be read once, `deterministic=False`, a
full shuffle of what has no length, chains that differ between workers, and a resumed epoch of another chain.

This file checks arguments and makes stages. Start reading at `Dataset`, then at `views`.
"""

from __future__ import annotations

import glob
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from manyhands.data.pipeline import stages as st
from manyhands.data.pipeline.binding import Binding
from manyhands.data.pipeline.chain_source import AUTOTUNE
from manyhands.data.pipeline.elements import structure
from manyhands.data.pipeline.leaves import PARQUET, PICTURES, class_folders, class_of, row_groups
from manyhands.data.pipeline.signature import SignedGenerator
from manyhands.data.pipeline.views import ENDLESS
from manyhands.data.sources.columns import ColumnTable, is_array
from manyhands.data.sources.file_formats import ENDINGS
from manyhands.errors import DataError
from manyhands.spec.keyword_check import checked_class

__all__ = ["Dataset"]

_FULL: Literal["full"] = "full"
TUNED_CYCLE = 8
"""The `cycle_length` of an interleave that leaves it to us: the same everywhere."""


@checked_class()
class Dataset:
    """Data as a chain of steps, as in tf.data, for `fit`, `evaluate`, `predict` and `hands.batches`.

    Every worker is given the same chain; which worker computes which examples follows from the slices of a batch. The
    elements, their order and what random functions draw depend on the chain, the run's seed, the epoch and the example
    only. A chain that ends in `batch(B)` sets the global batch. docs/datasets.md has examples, and where a chain cannot
    be read by position.

    Args:
        stage: What a chain is inside; chains begin with `from_tensor_slices`, `from_files` and the like.
    """

    AUTOTUNE = AUTOTUNE
    INFINITE_CARDINALITY = -1
    UNKNOWN_CARDINALITY = -2

    def __init__(self, stage: st.Stage) -> None:
        if not isinstance(stage, st.Stage):
            raise DataError(
                f"A Dataset was made of a {type(stage).__name__}.",
                fix=["mh.Dataset.from_tensor_slices(...)", "mh.Dataset.from_generator(...)"],
            )
        self._stage = stage

    @property
    def stage(self) -> st.Stage:
        return self._stage

    @staticmethod
    def from_tensor_slices(tensors: Any) -> Dataset:
        """An element for each row of the first dimension.

        Args:
            tensors: A tensor, array or list, or a tuple or dict of these with the same number of rows. Lists of text
                are possible, such as paths. Memory-mapped arrays stay on disk.
        """
        return Dataset(_columns(tensors))

    @staticmethod
    def range(*args: int) -> Dataset:
        """Whole numbers, as of Python's `range`.

        Args:
            args: `stop`; `start, stop`; or `start, stop, step`.
        """
        numbers = range(*args)
        return Dataset(st.RangeStage(numbers.start, numbers.stop, numbers.step))

    @staticmethod
    def from_generator(
        generator: Callable[..., Any], args: tuple[Any, ...] = (), *, output_signature: Any = None
    ) -> Dataset:
        """What a generator function yields. It is called again for every epoch, in every worker, and must yield the
        same elements then; its draws from `random`, `numpy` and `torch` are the same everywhere.

        Args:
            generator: The function itself, not called. A parameter named `epoch` gets the number of the epoch, from 0.
            args: Its arguments.
            output_signature: A `manyhands.distribute.TensorSpec` for each tensor of an element, in its structure.
                Elements are converted to these types, and refused if they have another shape, or if a type cannot hold
                them. Default: elements as they are.
        """
        if not callable(generator):
            raise DataError(
                f"from_generator was given a {type(generator).__name__}: it can be read only once, so no second epoch, "
                "no other worker and no resumed run could read it.",
                where="from_generator",
                fix=["the generator function itself, without calling it", "from_tensor_slices(list(...))"],
            )
        takes_epoch = "epoch" in inspect.signature(generator).parameters
        function = generator if output_signature is None else SignedGenerator(generator, output_signature)
        return Dataset(st.GeneratorStage(function, tuple(args), takes_epoch))

    @staticmethod
    def list_files(
        file_pattern: str | Sequence[str], shuffle: bool = True, seed: int | None = None, *, row_groups: bool = False
    ) -> Dataset:
        """The paths that match, each an element. They are listed now, in order of their names.

        Args:
            file_pattern: A pattern such as "data/*.txt", or several.
            shuffle: In another order in each epoch, as in tf.data.
            seed: As for `shuffle`.
            row_groups: An element for each row group of Parquet files, which `from_files` reads, too.
        """
        paths = _listed(file_pattern)
        names = tuple(name for path in paths for name in _row_groups(path)) if row_groups else tuple(paths)
        listed = Dataset(st.NamesStage(names))
        return listed.shuffle(_FULL, seed) if shuffle else listed

    @staticmethod
    def from_files(
        files: str | Sequence[str], *, columns: Sequence[str] | None = None, class_names: Sequence[str] | None = None
    ) -> Dataset:
        """The rows of files, in order: lines of `.txt`, values of `.jsonl`, rows of `.csv`, `.npy`, `.npz`,
        `.safetensors` and `.parquet`; pictures (`.jpg`, `.png`, ...) as uint8 tensors, channels first.

        Args:
            files: A path, a pattern or several of them, of one kind; or a folder of pictures with a subfolder for each
                class, which gives pairs of picture and label (the number of the class, in order of the names).
            columns: Of Parquet files, the columns to read. Default: all.
            class_names: Of a folder of pictures, the subfolders in order of their labels. Default: all, also an empty
                one, in order of their names. A folder that lacks a class needs the names of the one trained on.
        """
        if isinstance(files, str | os.PathLike) and os.path.isdir(files):
            if columns is not None:
                raise DataError("columns= is for Parquet files.", where="from_files", fix=["no columns="])
            return Dataset(_picture_folder(os.fspath(files), class_names))
        if class_names is not None:
            raise DataError(
                "class_names= is for a folder of pictures.", where="from_files", fix=['from_files("pictures")']
            )
        paths = _listed(files)
        return Dataset(
            st.FilesStage(tuple(paths), _kind_of(paths, columns), None if columns is None else tuple(columns))
        )

    @staticmethod
    def zip(*datasets: Any) -> Dataset:
        """Elements of several Datasets side by side, in tuples; as many as the shortest has.

        Args:
            datasets: Datasets, one tuple of them, or a dict of them for elements that are dicts.
        """
        if len(datasets) == 1 and isinstance(datasets[0], Dataset):
            raise DataError(
                "zip was given one Dataset; the one that it is called on, as in a.zip(b), is not among its arguments.",
                where="zip",
                fix=["mh.Dataset.zip(pictures, labels)"],
            )
        if len(datasets) == 1 and isinstance(datasets[0], tuple | list | dict):
            given = datasets[0]
            names = tuple(given) if isinstance(given, dict) else None
            datasets = tuple(given.values() if isinstance(given, dict) else given)
        else:
            names = None
        if not datasets:
            raise DataError("zip was given no Dataset.", where="zip", fix=["mh.Dataset.zip(pictures, labels)"])
        return Dataset(st.ZipStage(tuple(_stage_of(one, "zip") for one in datasets), names))

    def map(
        self, map_func: Callable[..., Any], num_parallel_calls: int | None = None, deterministic: bool | None = None
    ) -> Dataset:
        """The result of a function of each element; a tuple is passed as several arguments.

        What it draws from `random`, `numpy` and `torch` depends on the run's seed, the epoch and the example only.

        Args:
            map_func: The function. After `batch` it is given whole batches, and must keep their number of rows.
            num_parallel_calls: Loader processes per worker that compute ahead. They are spawned: the function must be
                importable. `mh.Dataset.AUTOTUNE`: one for each core, divided among the workers. Default: the worker
                itself calls it.
            deterministic: Only None and True: the order is never a matter of time.
        """
        _check_deterministic(deterministic, "map")
        _check_function(map_func, "map")
        _check_tuned(num_parallel_calls, "num_parallel_calls", "map")
        processes = 0 if num_parallel_calls is None else num_parallel_calls
        return Dataset(st.MapStage(self._stage, map_func, processes))

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """The elements for which a function is true. What follows can only be read forward.

        Args:
            predicate: The function, called as by `map`, on all elements in every worker.
        """
        _check_function(predicate, "filter")
        return Dataset(st.FilterStage(self._stage, predicate))

    def shuffle(
        self, buffer_size: int | Literal["full"], seed: int | None = None, reshuffle_each_iteration: bool = True
    ) -> Dataset:
        """The elements in another order in each epoch, and in each repetition of a `repeat` that follows.

        Args:
            buffer_size: How many elements the next one is drawn from, as in tf.data; "full", or a number that is not
                below that of the elements: any order is as likely, and costs no memory.
            seed: Together with the run's seed, in place of the stage's number: Datasets that are shuffled with one seed
                stay in step.
            reshuffle_each_iteration: False: the same order in every epoch.
        """
        if buffer_size == _FULL:
            return Dataset(st.ShuffleStage(self._stage, None, seed, reshuffle_each_iteration))
        _check_count(buffer_size, "buffer_size", "shuffle", fix='shuffle("full"), shuffle(1000)')
        return Dataset(st.ShuffleStage(self._stage, int(buffer_size), seed, reshuffle_each_iteration))

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Several elements as one, with a new first dimension. At the end of a chain this is the global batch.

        Args:
            batch_size: Elements per batch, over all workers.
            drop_remainder: Without the last batch, if it is not full.
            num_parallel_calls: Accepted as in tf.data: each worker makes the part of a batch that it uses.
            deterministic: As for `map`.
        """
        _check_deterministic(deterministic, "batch")
        _check_tuned(num_parallel_calls, "num_parallel_calls", "batch")
        _check_count(batch_size, "batch_size", "batch")
        return Dataset(st.BatchStage(self._stage, int(batch_size), drop_remainder))

    def padded_batch(
        self, batch_size: int, padded_shapes: Any = None, padding_values: Any = None, drop_remainder: bool = False
    ) -> Dataset:
        """As `batch`, for elements that differ in length.

        Args:
            batch_size: Elements per batch.
            padded_shapes: A shape for each part of an element, such as `([None], [])`: None, or -1, is the longest
                of the batch, and costs each worker the whole batch. Default: None everywhere.
            padding_values: What is padded with, one for all parts or one for each. Default: 0.
            drop_remainder: As for `batch`.
        """
        _check_count(batch_size, "batch_size", "padded_batch")
        return Dataset(st.PaddedBatchStage(self._stage, int(batch_size), drop_remainder, padded_shapes, padding_values))

    def unbatch(self) -> Dataset:
        """The rows of elements that are batches, one by one. What follows can only be read forward."""
        return Dataset(st.UnbatchStage(self._stage))

    def repeat(self, count: int | None = None) -> Dataset:
        """The elements several times.

        Args:
            count: How often. Default, and -1: without an end, so that `fit` needs `steps=`.
        """
        return Dataset(st.RepeatStage(self._stage, _or_all(count, "count", "repeat")))

    def take(self, count: int) -> Dataset:
        """The first elements.

        Args:
            count: How many; -1: all.
        """
        return Dataset(st.TakeStage(self._stage, _or_all(count, "count", "take")))

    def skip(self, count: int) -> Dataset:
        """Without the first elements.

        Args:
            count: How many; -1: all.
        """
        return Dataset(st.SkipStage(self._stage, _or_all(count, "count", "skip")))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Every `num_shards`-th element. Not for dividing data among workers, which is done by slices.

        Args:
            num_shards: How many parts there are.
            index: Which of them, from 0. The same on every worker.
        """
        _check_count(num_shards, "num_shards", "shard")
        if not 0 <= index < num_shards:
            raise DataError(f"index is {index} of {num_shards} shards.", where="shard", fix=["shard(4, 0)"])
        return Dataset(st.ShardStage(self._stage, num_shards, index))

    def concatenate(self, dataset: Dataset) -> Dataset:
        """These elements, then those of another Dataset.

        Args:
            dataset: The other one.
        """
        return Dataset(st.ConcatenateStage(self._stage, _stage_of(dataset, "concatenate")))

    def interleave(
        self,
        map_func: Callable[..., Dataset],
        cycle_length: int | None = 1,
        block_length: int | None = 1,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Elements of the Datasets that a function makes of each element, taken in turn.

        Args:
            map_func: Returns a Dataset, such as `mh.Dataset.from_files`.
            cycle_length: How many Datasets are open at a time. `mh.Dataset.AUTOTUNE`, and None: 8, on every machine, as
                the order depends on it.
            block_length: How many elements are taken from each in turn; None: 1.
            num_parallel_calls: Accepted as in tf.data; elements are computed where they are needed.
            deterministic: As for `map`.
        """
        cycle_length = TUNED_CYCLE if cycle_length in (None, AUTOTUNE) else cycle_length
        block_length = 1 if block_length is None else block_length
        _check_deterministic(deterministic, "interleave")
        _check_function(map_func, "interleave")
        _check_count(cycle_length, "cycle_length", "interleave")
        _check_count(block_length, "block_length", "interleave")
        _check_tuned(num_parallel_calls, "num_parallel_calls", "interleave")
        return Dataset(st.InterleaveStage(self._stage, map_func, int(cycle_length or 1), int(block_length)))

    def cache(self, filename: str = "") -> Dataset:
        """The elements as in the first epoch, in every epoch, kept in the memory of the processes that compute them.

        Args:
            filename: Only "": memory.
        """
        if filename:
            raise DataError(
                f"cache({filename!r}) would keep elements in a file, which outlives the functions that made them: "
                "after a change of a map, a run would train with what the old one returned, and nothing could tell.",
                where="cache",
                fix=["cache(), in memory", 'np.save("prepared-1.npy", rows), once, and from_files("prepared-1.npy")'],
            )
        return Dataset(st.CacheStage(self._stage))

    def prefetch(self, buffer_size: int | None = None) -> Dataset:
        """The same elements: a run fetches two steps ahead in any case, in loader processes if `map` has them.

        Args:
            buffer_size: Accepted as in tf.data, `mh.Dataset.AUTOTUNE` too; it has no effect.
        """
        _check_tuned(buffer_size, "buffer_size", "prefetch")
        return Dataset(st.PrefetchStage(self._stage))

    def enumerate(self, start: int = 0) -> Dataset:
        """Pairs of a number and an element.

        Args:
            start: The first number.
        """
        return Dataset(st.EnumerateStage(self._stage, start))

    def values(self, epoch: int = 0, seed: int = 0) -> Iterator[Any]:
        """The elements of an epoch in this process, as `map` gets them.

        Args:
            epoch: Of which epoch: an iteration does not count epochs, so that it can be repeated.
            seed: That of the run.
        """
        return (pending.value() for pending in Binding(self._stage, seed).stream(self._stage, epoch))

    def as_numpy_iterator(self, epoch: int = 0, seed: int = 0) -> Iterator[Any]:
        """The elements in this process, with arrays in place of tensors.

        Args:
            epoch: Of which epoch: an iteration does not count epochs, so that it can be repeated.
            seed: That of the run.
        """
        return (structure(_as_numpy, value) for value in self.values(epoch, seed))

    def cardinality(self) -> int:
        """The number of elements; `INFINITE_CARDINALITY`, or `UNKNOWN_CARDINALITY` if it would have to be counted."""
        view = Binding(self._stage, 0).view(self._stage)
        if view is None:
            return self.UNKNOWN_CARDINALITY
        return self.INFINITE_CARDINALITY if view.length >= ENDLESS else view.length

    def __len__(self) -> int:
        count = self.cardinality()
        if count < 0:
            what = (
                "repeats without an end" if count == self.INFINITE_CARDINALITY else "can only be counted by reading it"
            )
            raise TypeError(f"This Dataset {what}, so it has no length.")
        return count

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        """The elements of the first epoch under seed 0, in this process: for looking at them, not for training."""
        return self.values()

    def __repr__(self) -> str:
        return f"mh.Dataset: {st.describe(self._stage)}"


def _as_numpy(leaf: Any) -> Any:
    return leaf.numpy() if isinstance(leaf, torch.Tensor) and leaf.dtype != torch.bfloat16 else leaf


def _stage_of(given: Any, where: str) -> st.Stage:
    if isinstance(given, Dataset):
        return given.stage
    raise DataError(
        f"{where} was given a {type(given).__name__}.", where=where, fix=["mh.Dataset.from_tensor_slices(...)"]
    )


def _columns(tensors: Any) -> st.Stage:
    """Columns of a table; with columns of text, several sources side by side."""
    arrays = _as_arrays(tensors)
    if not _has_text(arrays):
        return st.ColumnsStage(ColumnTable(arrays))
    stage = _side_by_side(arrays)
    counts = {
        len(one.values) if isinstance(one, st.NamesStage) else one.table.num_rows
        for one in st.walk(stage)
        if isinstance(one, st.NamesStage | st.ColumnsStage)
    }
    if len(counts) > 1:
        raise DataError(
            f"Columns differ in their number of rows: {sorted(counts)}.",
            where="from_tensor_slices",
            fix=["the same first dimension for all"],
        )
    return stage


def _side_by_side(arrays: Any) -> st.Stage:
    if isinstance(arrays, st.Stage):
        return arrays
    if not isinstance(arrays, dict | tuple):
        return st.ColumnsStage(ColumnTable(arrays))
    items = arrays.values() if isinstance(arrays, dict) else arrays
    return st.ZipStage(tuple(map(_side_by_side, items)), tuple(arrays) if isinstance(arrays, dict) else None)


def _as_arrays(value: Any) -> Any:
    """The same structure with lists of numbers as arrays and lists of text as `Names`; a table's columns as arrays."""
    if isinstance(value, dict):
        return {key: _as_arrays(item) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [_as_arrays(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list) and value and all(is_array(item) for item in value):
        return torch.stack([torch.as_tensor(item) for item in value])
    array = _as_array(value) if isinstance(value, list) else value.to_numpy() if hasattr(value, "to_numpy") else value
    if isinstance(array, np.ndarray) and array.ndim == 1:
        is_text = array.dtype.kind in "US" or (
            array.dtype.kind == "O" and len(array) and all(isinstance(item, str) for item in array)
        )
        if is_text:
            return st.NamesStage(tuple(str(item) for item in array.tolist()))
    # Python floats are doubles because Python has no other float; models use float32.
    return array.astype(np.float32) if isinstance(value, list) and array.dtype.kind == "f" else array


def _as_array(rows: list[Any]) -> Any:
    try:
        return np.asarray(rows)
    except ValueError as error:
        raise DataError(
            f"The rows of a list differ in shape, so that no array can hold them: {error}",
            where="from_tensor_slices",
            fix=["from_generator(function), and padded_batch", "rows of one length"],
        ) from error


def _has_text(arrays: Any) -> bool:
    if isinstance(arrays, dict | tuple):
        return any(map(_has_text, arrays.values() if isinstance(arrays, dict) else arrays))
    return isinstance(arrays, st.NamesStage)


def _listed(files: str | Sequence[str]) -> list[str]:
    """The files of each pattern in order of their names; a path that exists stands for itself."""
    paths: list[str] = []
    for given in [files] if isinstance(files, str | os.PathLike) else files:
        pattern = os.fspath(given)
        path, _, _group = pattern.partition("#")
        if os.path.isfile(pattern) or (path.endswith(PARQUET) and os.path.isfile(path)):
            found = [pattern]
        else:
            found = sorted(name for name in glob.glob(pattern, recursive=True) if os.path.isfile(name))
        if not found:
            raise DataError(
                f"No file matches {pattern}.", fix=["the path as seen from where the command runs", '"data/*.txt"']
            )
        paths += found
    return paths


def _row_groups(path: str) -> list[str]:
    if not path.endswith(PARQUET):
        raise DataError(f"{path} has no row groups.", where="list_files", fix=["no row_groups=", '"data/*.parquet"'])
    return row_groups(path)


def _kind_of(paths: Sequence[str], columns: Sequence[str] | None) -> str:
    endings = {Path(path.partition("#")[0] if PARQUET in path else path).suffix.lower() for path in paths}
    kinds = {"pictures" if one in PICTURES else "parquet" if one == PARQUET else one for one in endings}
    if len(kinds) > 1:
        raise DataError(
            f"The files are of several kinds: {', '.join(sorted(endings))}.",
            where="from_files",
            fix=["a pattern for one kind", "from_files(...).concatenate(from_files(...))"],
        )
    (kind,) = kinds
    if columns is not None and kind != "parquet":
        raise DataError(
            "columns= is for Parquet files.", where="from_files", fix=["a map that returns the fields that are needed"]
        )
    if kind in ("pictures", "parquet"):
        return kind
    if kind not in ENDINGS:
        known = [*ENDINGS, PARQUET, *PICTURES]
        raise DataError(
            f"{kind or 'No ending'} is not a known kind of file.", where="from_files", fix=[" ".join(known)]
        )
    return "rows"


def _picture_folder(folder: str, class_names: Sequence[str] | None) -> st.FilesStage:
    classes = class_folders(folder)
    found = sorted(
        str(path)
        for name in classes
        for path in Path(folder, name).glob("**/*")
        if path.suffix.lower() in PICTURES and path.is_file()
    )
    if not found:
        raise DataError(
            f"{folder} has no pictures in subfolders, one for each class.",
            where="from_files",
            fix=[f'from_files("{folder}/*.jpg"), for pictures without labels', f'from_files("{folder}/*.txt")'],
        )
    names = [class_of(path, folder) for path in found]
    listed = classes if class_names is None else list(class_names)
    if unknown := sorted(set(names) - set(listed)):
        raise DataError(
            f"{folder} has the class {unknown[0]}, which is not in class_names.",
            where="from_files",
            fix=['class_names=mh.images.class_names("the folder that is trained on")'],
        )
    empty = sorted(set(classes) - set(names))
    if empty and class_names is None:
        warnings.warn(f"{folder} has no pictures in {', '.join(empty)}, which is a class as the others.", stacklevel=3)
    return st.FilesStage(tuple(found), "pictures", folder=folder, classes=tuple(listed))


def _check_function(function: Any, where: str) -> None:
    if not callable(function):
        raise DataError(f"{where} was given a {type(function).__name__}.", where=where, fix=[f"{where}(function)"])


def _check_deterministic(deterministic: bool | None, where: str) -> None:
    if deterministic is False:
        raise DataError(
            "deterministic=False would let the order depend on which process is faster, so that no run could be "
            "resumed or compared.",
            where=where,
            fix=["no deterministic="],
        )


def _check_tuned(value: int | None, name: str, where: str) -> None:
    """`DataError` unless it is a number, None or `AUTOTUNE`."""
    if value is not None and value != AUTOTUNE:
        _check_count(value, name, where, least=0, fix=f"{name}=mh.Dataset.AUTOTUNE")


def _check_count(value: Any, name: str, where: str, *, least: int = 1, fix: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise DataError(
            f"{name} is {value!r}, but must be a whole number from {least} on.",
            where=where,
            fix=[fix or f"{name}={max(1, least)}"],
        )


def _or_all(count: int | None, name: str, where: str) -> int | None:
    if count is None or count == -1:
        return None
    _check_count(count, name, where, least=0)
    return int(count)
