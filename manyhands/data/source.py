"""Data of every kind: rows by number (`RowSource`), a stream (`StreamSource`) or data per slice (`ApartSource`).

`as_source` looks at what the user gave and says what it is, or refuses it with the reason. Which rows make a step is
`order`; who fetches them, and when, is `feeds`.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
    default_convert,
)

from manyhands.data.apart import ApartSource
from manyhands.data.columns import Columns, is_array
from manyhands.data.exchange import RowExchange, agree
from manyhands.data.files import open_files
from manyhands.data.rows import Collate, DatasetReader, Reader, RowSource
from manyhands.data.streams import Opener, StreamSource
from manyhands.errors import DataError

__all__ = ["InputContext", "Source", "as_source", "split"]

Source = RowSource | StreamSource | ApartSource

# A longer list of tensors is more likely one of examples than one of columns, so it is refused.
_MOST_COLUMNS_IN_A_LIST = 16


class InputContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a function of the input context is given: which worker this is of how many, and which slices it computes.

    Args:
        worker: The number of this worker, from 0.
        num_workers: How many workers there are.
        slices: The slices of every batch that this worker computes.
        num_slices: V, how many slices a batch has.
        host: The number of this worker's host, from 0.
    """

    worker: int = 0
    num_workers: int = 1
    slices: tuple[int, ...] = (0,)
    num_slices: int = 1
    host: int = 0


def as_source(
    data: Any,
    *,
    collate: Collate | None = None,
    num_workers: int | None = None,
    context: InputContext | None = None,
    shuffle: bool = True,
    exchange: RowExchange | None = None,
) -> Source:
    """What the user gave as a source. Raises `DataError` for what cannot work, before anything is read.

    With an `exchange`, every worker must call this at the same place: file listings are put together, and data
    whose length differs between workers is refused.
    """
    if isinstance(data, RowSource | StreamSource | ApartSource):
        return data
    asked = _Asked(collate, num_workers, context or InputContext(), exchange)
    source = _recognise(data, asked)
    source.shuffle = source.shuffle and shuffle
    if source.num_rows == 0:
        raise DataError(f"The data ({type(data).__name__}) has no rows.", fix=["data with at least one example"])
    agree(exchange, type(source).__name__, source.num_rows)
    return source


class _Asked(msgspec.Struct, frozen=True):
    collate: Collate | None
    num_workers: int | None
    context: InputContext
    exchange: RowExchange | None


def _recognise(data: Any, asked: _Asked) -> Source:
    if isinstance(data, str | os.PathLike):
        reader = open_files(os.fspath(data), asked.collate, asked.exchange, host=asked.context.host)
        return _from_reader(reader, asked)
    if isinstance(data, DataLoader):
        return _from_loader(data, asked)
    if _are_columns(data):
        return _from_columns(data, asked)
    if isinstance(data, IterableDataset):
        return _from_iterable(data, asked)
    if hasattr(data, "__getitem__") and not isinstance(data, type):
        return _from_dataset(data, asked)
    if isinstance(data, Iterator):
        raise DataError(
            f"A {type(data).__name__} can be read only once, so no second epoch and no resumed run could read it.",
            fix=["the generator function itself, without calling it", "a list, or an object with __iter__"],
        )
    if hasattr(data, "__iter__") and not isinstance(data, type):
        return _from_iterable(data, asked)
    if callable(data):
        return _from_function(data, asked)
    raise DataError(
        f"Data cannot be a {type(data).__name__}.",
        fix=["a tuple of tensors", "a Dataset", "a DataLoader", "a generator function", '"data/*.npy"'],
    )


def _are_columns(data: Any) -> bool:
    if isinstance(data, list) and data and all(is_array(item) for item in data) and len(data) > _MOST_COLUMNS_IN_A_LIST:
        raise DataError(
            f"A list of {len(data)} tensors may be columns or examples; it does not say which.",
            fix=["tuple(data), if each tensor is a column", "torch.stack(data), if each tensor is an example"],
        )
    if isinstance(data, tuple | list):
        # A list of tuples of tensors is a list of examples; nested columns are told by the outer tuple or dict.
        return isinstance(data, tuple) or (bool(data) and all(is_array(item) for item in data))
    return isinstance(data, Mapping) or is_array(data) or type(data) is TensorDataset


def _from_columns(data: Any, asked: _Asked) -> Source:
    # A list, because that is what a DataLoader makes of a TensorDataset.
    columns = Columns(list(data.tensors) if type(data) is TensorDataset else data)
    source = _from_reader(columns if asked.collate is None else DatasetReader(columns, asked.collate), asked)
    if source.fetched_by == "thread" and columns.in_memory:
        source.fetched_by = "memory"
    return source


def _from_reader(reader: Reader, asked: _Asked) -> RowSource:
    """Tensors and files: nothing of the user's runs and nothing is drawn, unless there is a collate function."""
    if asked.collate is not None:
        return RowSource(reader, fetched_by="caller", num_workers=asked.num_workers or 0)
    if asked.num_workers:
        warnings.warn(f"num_workers={asked.num_workers} is ignored: a thread reads tensors and files.", stacklevel=6)
    return RowSource(reader, fetched_by="thread")


def _from_dataset(data: Any, asked: _Asked) -> Source:
    if hasattr(data, "iloc"):
        raise DataError(
            f"A {type(data).__name__} is indexed by column, not by row.",
            fix=['{"x": frame[names].to_numpy(), "y": frame["y"].to_numpy()}'],
        )
    return RowSource(DatasetReader(data, asked.collate), fetched_by="caller", num_workers=asked.num_workers or 0)


def _from_iterable(data: Any, asked: _Asked) -> Source:
    if (asked.num_workers or 0) > 1:
        warnings.warn(f"num_workers={asked.num_workers}: a stream is read by one loader process.", stacklevel=5)
    return StreamSource(data, asked.collate, num_workers=min(1, asked.num_workers or 0))


def _from_function(function: Callable[..., Any], asked: _Asked) -> Source:
    """No parameter: gives rows. `epoch`: the same, told the epoch. One other: a function of the input context."""
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes_epoch = any(p.name == "epoch" for p in parameters)
    others = [name for name in needed if name != "epoch"]
    if len(others) > 1:
        raise DataError(
            f"A data function takes the input context, `epoch` or nothing, but this needs {', '.join(others)}.",
            fix=["def rows(): ...", "def rows(epoch): ...", "def data(context): ..."],
        )
    args = (asked.context,) if others else ()
    if not others or takes_epoch or inspect.isgeneratorfunction(function):
        return _from_iterable(Opener(function, args, takes_epoch=takes_epoch), asked)
    made = function(asked.context)
    if isinstance(made, dict) and made and all(isinstance(key, int) for key in made):
        return _from_slices(made, asked)
    return _recognise(made, asked)


def _from_slices(made: dict[int, Any], asked: _Asked) -> ApartSource:
    wanted = asked.context.slices
    missing = [v for v in wanted if v not in made]
    if missing:
        raise DataError(
            f"The data function gave slices {sorted(made)}, but this worker computes {list(wanted)}.",
            fix=["{v: data_of(v) for v in context.slices}"],
        )
    alone = msgspec.structs.replace(asked, exchange=None, num_workers=0)
    return ApartSource({v: _recognise(made[v], alone) for v in wanted}, asked.context.num_slices, asked.exchange)


def _from_loader(loader: DataLoader[Any], asked: _Asked) -> Source:
    """A DataLoader's dataset, collate_fn and num_workers; how it would cut and order batches is ours."""
    _refuse_samplers(loader)
    collate = None if loader.collate_fn in (default_collate, default_convert) else loader.collate_fn
    num_workers = loader.num_workers if asked.num_workers is None else asked.num_workers
    taken = msgspec.structs.replace(asked, collate=asked.collate or collate, num_workers=num_workers)
    source = _recognise(loader.dataset, taken)
    if isinstance(loader.sampler, SequentialSampler):
        source.shuffle = False
    source.loader_batch_size = loader.batch_size
    if loader.drop_last:
        warnings.warn("drop_last=True is ignored: a short last batch is used, so that no row is lost.", stacklevel=5)
    return source


def _refuse_samplers(loader: DataLoader[Any]) -> None:
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise DataError(
            "This DataLoader makes its batches itself (batch_size=None or a batch_sampler). Here every global batch is "
            "cut into slices, so that the result does not depend on the number of workers.",
            fix=["fit(loader.dataset, batch_size=..., collate=...)"],
        )
    sampler = loader.sampler
    plain = (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )
    if not (plain or isinstance(sampler, SequentialSampler) or isinstance(loader.dataset, IterableDataset)):
        raise DataError(
            f"This DataLoader has a sampler of its own ({type(sampler).__name__}). Here the order is a function of "
            "(seed, epoch, position), so that no row is lost or used twice when workers join, die or resume.",
            fix=["DataLoader(dataset, shuffle=True)", "torch.utils.data.Subset(dataset, rows) to choose rows"],
        )


def split(data: Any, fraction: float) -> tuple[RowSource, RowSource]:
    """(training, validation): the last `fraction` of the rows, unshuffled, is for validation, as in Keras."""
    source = as_source(data)
    if not isinstance(source, RowSource):
        raise DataError(
            "validation_split needs data with a length, and this is a stream.", fix=["validation=other_data"]
        )
    cut = int(source.num_rows * (1 - fraction))
    if not 0 < cut < source.num_rows:
        raise DataError(
            f"validation_split={fraction} of {source.num_rows} rows leaves {cut} for training and "
            f"{source.num_rows - cut} for validation.",
            fix=["a fraction between 0 and 1, and enough rows", "validation=other_data"],
        )
    return source.part(0, cut), source.part(cut, source.num_rows)
