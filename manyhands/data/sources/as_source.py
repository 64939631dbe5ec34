"""Data of every kind: with row numbers (`RowSource`), a stream (`StreamSource`) or data per slice (`PerSliceSource`).

`as_source` recognises what the user passed, or refuses it with the reason. `sample_order` decides which rows make a
step; `feeds` fetches them.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from manyhands.data.custom_orders import Order
from manyhands.data.data_agreement import RowSample, agree, sample_of
from manyhands.data.pipeline.chain_source import ChainOrder, source_of
from manyhands.data.pipeline.dataset import Dataset
from manyhands.data.ready_batches import cannot_tell, may_be_batch
from manyhands.data.row_exchange import RowExchange
from manyhands.data.sources.columns import ColumnTable, is_array
from manyhands.data.sources.file_source import open_files
from manyhands.data.sources.per_slice_source import PerSliceSource
from manyhands.data.sources.row_source import Collate, DatasetReader, Reader, RowSource
from manyhands.data.sources.stream_source import Opener, StreamSource
from manyhands.data.sources.torch_dataloader import (
    LoaderBatches,
    order_of,
    own_collate,
    refuse_own_batches,
    warn_of_unused,
)
from manyhands.errors import DataError

__all__ = ["InputContext", "Source", "as_source", "describe", "gives_items", "split"]

Source = RowSource | StreamSource | PerSliceSource

# A longer list of tensors is more likely a list of examples than of columns, so it is refused.
_MAX_COLUMNS_IN_A_LIST = 16


class InputContext(msgspec.Struct, frozen=True, kw_only=True):
    """The argument of a data function: which worker this is of how many, and which slices it computes.

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
    batched: bool | None = None,
    order: Order | None = None,
    seed: int = 0,
) -> Source:
    """The source for the user's data. Raises `DataError` for data that cannot work, before anything is read.

    With `batched` each item of the data is one global batch; False means one example. `order` sets which rows an epoch
    uses, and in which order. A `Dataset` draws its order and its random numbers from `seed`.

    With an `exchange`, every worker must call this at the same point: file listings are merged, and data whose length
    or sampled rows differ between workers is refused.
    """
    if isinstance(data, RowSource | StreamSource | PerSliceSource):
        return data
    options = _Options(collate, num_workers, context or InputContext(), exchange, batched, seed)
    if batched:
        _refuse_batched(data, collate)
    source = _recognise(data, options)
    if order is not None:
        _put_in_order(source, order)
    source.shuffle = source.shuffle and shuffle
    if source.num_rows == 0:
        raise DataError(f"The data ({type(data).__name__}) has no rows.", fix=["data with at least one example"])
    identity = source.order.identity() if isinstance(source, RowSource) and source.order else ""
    identity = source.identity if isinstance(source, StreamSource) else identity
    chosen = f" in the order {identity}" if identity else ""
    if exchange is not None:
        sample = sample_of(source.reader) if isinstance(source, RowSource) else RowSample()
        agree(exchange, f"{type(source).__name__}{chosen}", source.num_rows, sample)
    return source


def gives_items(data: Any) -> bool:
    """Whether the data yields items, which may be batches; tensors and files always have rows."""
    return not (isinstance(data, str | os.PathLike) or _are_columns(data))


def describe(source: Source) -> str:
    """How the data was recognised, for the run's first line."""
    if isinstance(source, PerSliceSource):
        return "separate data for each slice"
    if isinstance(source, StreamSource):
        return "a stream of batches, each one global batch" if source.batched else "a stream of examples"
    if source.order is not None:
        return f"{source.num_rows} examples, {source.order.describe()}"
    return f"{source.num_rows} examples, {'shuffled' if source.shuffle else 'in order'}"


def _refuse_batched(data: Any, collate: Collate | None) -> None:
    if not gives_items(data):
        raise DataError(
            "batched=True is for data that yields whole batches, but this is cut into batches of batch_size rows.",
            fix=["no batched=True, and batch_size=32"],
        )
    if collate is not None:
        raise DataError(
            "collate makes a batch of examples, but with batched=True each item is a batch already.",
            fix=["no collate=", "no batched=True, and batch_size=32"],
        )


def _put_in_order(source: Source, order: Order) -> None:
    if isinstance(order, type) or not hasattr(order, "num_positions"):
        raise DataError(
            f"order is {order!r}.", fix=["order=mh.order.Weighted(weights)", "order=mh.order.ByLength(lengths)"]
        )
    if not isinstance(source, RowSource):
        raise DataError(
            "order= chooses among rows by their number, but this data can only be read from its start, or is a "
            "function of the worker.",
            fix=["data with a length: tensors, or a Dataset with __getitem__ and __len__", "no order="],
        )
    if isinstance(source.order, ChainOrder):
        raise DataError(
            "order= was given with a Dataset, which decides its order itself.",
            fix=["no order=", "the tensors themselves, without mh.Dataset"],
        )
    if source.order is not None:
        raise DataError(
            "The DataLoader has a sampler, and order= was given, too.",
            fix=["no order=", "DataLoader(dataset, shuffle=True)"],
        )
    order.check(source.num_rows)
    source.order = order


class _Options(msgspec.Struct, frozen=True):
    collate: Collate | None
    num_workers: int | None
    context: InputContext
    exchange: RowExchange | None
    batched: bool | None = None
    seed: int = 0


def _recognise(data: Any, options: _Options) -> Source:
    if isinstance(data, Dataset):
        return source_of(
            data.stage,
            seed=options.seed,
            collate=options.collate,
            num_workers=options.num_workers,
            batched=options.batched,
            workers=options.context.num_workers,
            exchange=options.exchange,
        )
    if isinstance(data, str | os.PathLike):
        reader = open_files(os.fspath(data), options.collate, options.exchange, host=options.context.host)
        return _from_reader(reader, options)
    if isinstance(data, DataLoader):
        return _from_loader(data, options)
    if _are_columns(data):
        return _from_columns(data, options)
    if isinstance(data, IterableDataset):
        return _from_iterable(data, options)
    if hasattr(data, "__getitem__") and not isinstance(data, type):
        return _from_dataset(data, options)
    if isinstance(data, Iterator):
        raise DataError(
            f"A {type(data).__name__} can be read only once, so no second epoch and no resumed run could read it.",
            fix=["the generator function itself, without calling it", "a list, or an object with __iter__"],
        )
    if hasattr(data, "__iter__") and not isinstance(data, type):
        return _from_iterable(data, options)
    if callable(data):
        return _from_function(data, options)
    raise DataError(
        f"Data cannot be a {type(data).__name__}.",
        fix=["a tuple of tensors", "a Dataset", "a DataLoader", "a generator function", '"data/*.npy"'],
    )


def _are_columns(data: Any) -> bool:
    if isinstance(data, list) and data and all(is_array(item) for item in data) and len(data) > _MAX_COLUMNS_IN_A_LIST:
        raise DataError(
            f"A list of {len(data)} tensors may be columns or examples; it does not say which.",
            fix=["tuple(data), if each tensor is a column", "torch.stack(data), if each tensor is an example"],
        )
    if isinstance(data, tuple | list):
        # A list of tuples of tensors is a list of examples; the outer tuple or dict marks nested columns.
        return isinstance(data, tuple) or (bool(data) and all(is_array(item) for item in data))
    return isinstance(data, Mapping) or is_array(data) or type(data) is TensorDataset


def _from_columns(data: Any, options: _Options) -> Source:
    # A list, because a DataLoader of a TensorDataset yields lists.
    columns = ColumnTable(list(data.tensors) if type(data) is TensorDataset else data)
    source = _from_reader(columns if options.collate is None else DatasetReader(columns, options.collate), options)
    if source.fetched_by == "thread" and columns.in_memory:
        source.fetched_by = "memory"
    return source


def _from_reader(reader: Reader, options: _Options) -> RowSource:
    """Tensors and files: no user code runs and no random numbers are drawn, unless there is a collate function."""
    if options.collate is not None:
        return RowSource(reader, fetched_by="caller", num_workers=options.num_workers or 0)
    if options.num_workers:
        warnings.warn(f"num_workers={options.num_workers} is ignored: a thread reads tensors and files.", stacklevel=6)
    return RowSource(reader, fetched_by="thread")


def _from_dataset(data: Any, options: _Options) -> Source:
    if hasattr(data, "iloc"):
        raise DataError(
            f"A {type(data).__name__} is indexed by column, not by row.",
            fix=['{"x": frame[names].to_numpy(), "y": frame["y"].to_numpy()}'],
        )
    reader = DatasetReader(data, options.collate)
    if options.batched:
        return _from_iterable(_Items(data), options)
    # A Dataset's items are examples by torch's convention; the items of a plain list may be either.
    if options.batched is None and options.collate is None and type(data) is list and data and may_be_batch(data[0]):
        raise cannot_tell(data[0])
    return RowSource(reader, fetched_by="caller", num_workers=options.num_workers or 0)


class _Items:
    """Makes an indexable dataset iterable: not every dataset ends with an IndexError."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        return (self._data[number] for number in range(len(self._data)))


def _from_iterable(data: Any, options: _Options) -> Source:
    if (options.num_workers or 0) > 1:
        warnings.warn(f"num_workers={options.num_workers}: a stream is read by one loader process.", stacklevel=5)
    # Hugging Face's streams yield examples; otherwise only the items show it, and not always.
    batched = False if options.batched is None and hasattr(data, "column_names") else options.batched
    return StreamSource(data, options.collate, num_workers=min(1, options.num_workers or 0), batched=batched)


def _from_function(function: Callable[..., Any], options: _Options) -> Source:
    """No parameter: yields rows. `epoch`: yields rows of that epoch. One other: a function of the input context."""
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes_epoch = any(p.name == "epoch" for p in parameters)
    others = [name for name in needed if name != "epoch"]
    if len(others) > 1:
        raise DataError(
            f"A data function takes the input context, `epoch` or nothing, but this needs {', '.join(others)}.",
            fix=["def rows(): ...", "def rows(epoch): ...", "def data(context): ..."],
        )
    args = (options.context,) if others else ()
    if not others or takes_epoch or inspect.isgeneratorfunction(function):
        return _from_iterable(Opener(function, args, takes_epoch=takes_epoch), options)
    made = function(options.context)
    if isinstance(made, dict) and made and all(isinstance(key, int) for key in made):
        return _from_slices(made, options)
    return _recognise(made, options)


def _from_slices(made: dict[int, Any], options: _Options) -> PerSliceSource:
    wanted = options.context.slices
    missing = [v for v in wanted if v not in made]
    if missing:
        raise DataError(
            f"The data function gave slices {sorted(made)}, but this worker computes {list(wanted)}.",
            fix=["{v: data_of(v) for v in context.slices}"],
        )
    if options.batched:
        raise DataError(
            "batched=True is for whole global batches, but this data function returns separate data for each slice.",
            fix=["no batched=True, and batch_size=32", "one stream of batches for all"],
        )
    if any(isinstance(made[v], Dataset) for v in wanted):
        raise DataError(
            "The data function returned a Dataset for each slice, but a Dataset is divided into slices by us.",
            fix=["one Dataset for all slices"],
        )
    slice_options = msgspec.structs.replace(options, exchange=None, num_workers=0)
    return PerSliceSource(
        {v: _recognise(made[v], slice_options) for v in wanted}, options.context.num_slices, options.exchange
    )


def _from_loader(loader: DataLoader[Any], options: _Options) -> Source:
    """A DataLoader's dataset, collate_fn, sampler and num_workers; with `batched`, the batches that it yields."""
    if options.batched:
        return _from_iterable(
            LoaderBatches(loader), msgspec.structs.replace(options, num_workers=options.num_workers or 0)
        )
    if isinstance(loader.dataset, Dataset):
        raise DataError("A Dataset was given inside of a DataLoader.", fix=["fit(dataset): the Dataset itself"])
    refuse_own_batches(loader)
    warn_of_unused(loader)
    num_workers = loader.num_workers if options.num_workers is None else options.num_workers
    # A DataLoader that makes batches has examples as items.
    loader_options = msgspec.structs.replace(
        options, collate=options.collate or own_collate(loader), num_workers=num_workers, batched=False
    )
    source = _recognise(loader.dataset, loader_options)
    if isinstance(source, RowSource):
        source.shuffle, source.order = order_of(loader, source.num_rows)
    source.loader_batch_size, source.loader_timeout_s = loader.batch_size, loader.timeout or None
    return source


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
