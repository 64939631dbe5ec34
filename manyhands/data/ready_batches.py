"""Batches that the user's data has already collated: how many rows one has, and how it is cut into slices.

A batch is a structure of columns: a tuple, a dict, or at the top a list, of tensors and arrays whose first dimension
counts examples. A list below that has one entry per example (text, images of different sizes), and so has a list of
dicts or tuples at the top. Anything that cannot be cut raises an error with its path. Start reading at `num_rows_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.data.sources.columns import is_array
from manyhands.errors import DataError

__all__ = ["cannot_tell", "cut_rows", "may_be_batch", "num_rows_of"]


def num_rows_of(batch: Any) -> int:
    """Number of examples in a batch; `DataError` if its columns differ, or a part of it cannot be cut."""
    lengths: dict[str, int] = {}
    _walk(batch, "batch", lambda column, path: lengths.__setitem__(path, _length(column, path)), top=True)
    if len(set(lengths.values())) != 1:
        found = ", ".join(f"{path} has {rows}" for path, rows in lengths.items()) or "it has no columns"
        raise DataError(
            f"With batched=True each item is a whole batch, but the columns of this one differ in length: {found}.",
            fix=[
                "the same first dimension for all columns of a batch",
                "a tuple or dict for several columns: an inner list has one entry per example",
                "no batched=True, and batch_size=..., if each item is one example",
            ],
        )
    rows = next(iter(lengths.values()))
    if rows == 0:
        raise DataError("A batch has no rows.", fix=["at least one example in every batch"])
    return rows


def cut_rows(batch: Any, low: int, high: int) -> Any:
    """Rows [low, high), in the same structure. Copies: in-place changes by a loss must not change the user's data."""
    return _walk(batch, "batch", lambda column, _path: _cut(column, low, high), top=True)


def may_be_batch(item: Any) -> bool:
    """Whether an item of a stream looks like a batch: two columns or more, of the same length, and nothing else.

    An example may look the same, such as a sequence with a label for each of its positions.
    """
    lengths: list[int] = []

    def note(column: Any, path: str) -> None:
        lengths.append(len(column) if is_array(column) and column.ndim else -1)

    _walk(item, "item", note, top=True)
    return len(lengths) > 1 and len(set(lengths)) == 1 and lengths[0] > 1


def cannot_tell(item: Any) -> DataError:
    """For an item that `may_be_batch`, if the user has not set `batched`."""
    shapes: dict[str, str] = {}
    _walk(item, "item", lambda column, path: shapes.__setitem__(path, " x ".join(map(str, column.shape))), top=True)
    found = ", ".join(f"{path} is {shape}" for path, shape in shapes.items())
    return DataError(
        f"The data's first item may be a whole batch or one example: {found}.",
        fix=[
            "batched=True, and no batch_size: each item is one global batch, of which workers take slices",
            "batched=False: each item is one example, and batch_size of them make a batch",
        ],
    )


def _walk(batch: Any, path: str, visit: Callable[[Any, str], Any], *, top: bool = False) -> Any:
    """The same structure with `visit` of every column."""
    if isinstance(batch, Mapping):
        return {key: _walk(value, f"{path}[{key!r}]", visit) for key, value in batch.items()}
    if isinstance(batch, tuple) or (top and _lists_columns(batch)):
        items = [_walk(value, f"{path}[{number}]", visit) for number, value in enumerate(batch)]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return visit(batch, path)


def _lists_columns(batch: Any) -> bool:
    """As `default_collate` returns for tuples; but a list of dicts, or of text, is a list of examples."""
    return isinstance(batch, list) and any(is_array(item) or isinstance(item, list) for item in batch)


def _length(column: Any, path: str) -> int:
    if is_array(column) and column.ndim:
        return int(column.shape[0])
    if isinstance(column, list):
        return len(column)
    what = "one number" if is_array(column) or isinstance(column, int | float) else f"a {type(column).__name__}"
    raise DataError(
        f"With batched=True each item is a whole batch, but {path} is {what}, which cannot be cut into slices.",
        fix=[
            "no batched=True, and batch_size=..., if each item is one example",
            "tensors whose first dimension counts the examples of the batch, or lists with an entry for each",
        ],
    )


def _cut(column: Any, low: int, high: int) -> Any:
    if isinstance(column, Tensor):
        return column[low:high].clone()
    if isinstance(column, np.ndarray) and column.dtype.kind in "biufc":
        return torch.from_numpy(column[low:high].copy())
    return list(column[low:high])
