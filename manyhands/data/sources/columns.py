"""Tensors and arrays as data, and rows combined into a batch of columns.

`ColumnTable` is a structure (tuple, list or dict, nested as you like) of tensors or arrays with the same first
dimension; taking rows keeps the structure. `collate_rows` does the same for a list of dicts. Rows are always copied: a
loss that changes its batch in place must not change the data. No order and no slices here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manyhands.errors import DataError

__all__ = ["ColumnTable", "collate_columns", "collate_rows", "is_array"]

# numpy has neither bfloat16 nor float8; rows of these are copied as integers of the same size.
_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_array(value: object) -> bool:
    return isinstance(value, Tensor | np.ndarray)


class ColumnTable:
    """Rows of a structure of arrays; every leaf must have the same number of rows."""

    def __init__(self, data: Any) -> None:
        lengths: dict[str, int] = {}
        self._columns = _walk(data, "data", lambda leaf, path: _Column(leaf, path, lengths))
        if not lengths:
            raise DataError(f"The data is an empty {type(data).__name__}.", fix=["a tuple of tensors: (x, y)"])
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{path} has {rows}" for path, rows in lengths.items())
            raise DataError(
                f"Columns differ in their number of rows: {found}.", fix=["the same first dimension for all"]
            )
        self.num_rows = next(iter(lengths.values()))
        mapped: list[bool] = []
        _each(self._columns, lambda column: mapped.append(column.mapped))
        self.in_memory = not any(mapped)
        """Whether no leaf is memory-mapped, so that taking rows reads no file."""
        self._take = _Column.take if self.in_memory else _Column.take_in_thread

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> Any:
        return _each(self._columns, lambda column: self._take(column, np.array([row]))[0])

    def take(self, rows: npt.NDArray[np.int64]) -> Any:
        return _each(self._columns, lambda column: self._take(column, rows))


class _Column:
    """One leaf: an array that numpy can address (memory-mapped ones stay on disk), or a tensor that it cannot."""

    def __init__(self, leaf: object, path: str, lengths: dict[str, int]) -> None:
        if not isinstance(leaf, Tensor | np.ndarray):
            fix = f"{path} alone" if hasattr(leaf, "column_names") else "torch.tensor(...) around it"
            raise DataError(f"{path} is a {type(leaf).__name__}, not a tensor or array.", fix=[fix])
        if leaf.ndim == 0:
            raise DataError(
                f"{path} is one number, without rows.", fix=["a tensor whose first dimension counts examples"]
            )
        self._array, self._dtype = _from_numpy(leaf, path) if isinstance(leaf, np.ndarray) else _from_torch(leaf)
        self._tensor = leaf.detach() if isinstance(leaf, Tensor) else _shared_tensor(leaf)
        self.mapped = isinstance(leaf, np.memmap)
        lengths[path] = leaf.shape[0]

    def take(self, rows: npt.NDArray[np.int64]) -> Tensor:
        """Copies of the rows, made by torch's threads: for the thread that computes, which is idle meanwhile."""
        if self._tensor is None:
            return self.take_in_thread(rows)
        return self._tensor.index_select(0, torch.from_numpy(rows).to(self._tensor.device))

    def take_in_thread(self, rows: npt.NDArray[np.int64]) -> Tensor:
        """The same in this thread only, for a prefetch thread: torch would start a second thread pool there."""
        if self._array is None:
            return self.take(rows)
        taken = torch.empty((len(rows), *self._array.shape[1:]), dtype=self._dtype)
        target, _ = _from_torch(taken)
        assert target is not None
        if _is_range(rows):
            target[...] = self._array[rows[0] : rows[-1] + 1]
        else:
            np.take(self._array, rows, axis=0, out=target, mode="clip")  # mode="raise" would copy twice
        return taken


def _is_range(rows: npt.NDArray[np.int64]) -> bool:
    return bool(len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all())


def _from_torch(tensor: Tensor) -> tuple[npt.NDArray[Any] | None, torch.dtype]:
    """The tensor's memory as a numpy array, or None if numpy cannot address it."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
        return None, tensor.dtype
    plain = tensor.detach().resolve_conj().resolve_neg()
    try:
        return plain.numpy(), tensor.dtype
    except TypeError:
        return plain.view(_BY_SIZE[tensor.element_size()]).numpy(), tensor.dtype


def _from_numpy(array: npt.NDArray[Any], path: str) -> tuple[npt.NDArray[Any], torch.dtype]:
    try:
        dtype = torch.from_numpy(np.empty(0, array.dtype.newbyteorder("="))).dtype
    except TypeError:
        raise DataError(
            f"{path} is a numpy array of {array.dtype}, which no tensor can hold.",
            fix=["numbers only", "a Dataset whose rows are dicts"],
        ) from None
    return (array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))), dtype


def _shared_tensor(array: npt.NDArray[Any]) -> Tensor | None:
    """A tensor on the array's memory; None if torch cannot make one."""
    if isinstance(array, np.memmap) or not array.flags.writeable:  # torch warns of memory that it must not write to
        return None
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):
        return None


def _each(columns: Any, visit: Callable[[_Column], Any]) -> Any:
    """The structure of `columns` with every column replaced."""
    if type(columns) is _Column:
        return visit(columns)
    if isinstance(columns, dict):
        return {key: _each(value, visit) for key, value in columns.items()}
    items = [_each(value, visit) for value in columns]
    return type(columns)(*items) if hasattr(columns, "_fields") else type(columns)(items)


def _walk(data: Any, path: str, visit: Callable[[Any, str], Any]) -> Any:
    """The same structure with `visit(leaf, path)` for every leaf."""
    if isinstance(data, dict):
        return {key: _walk(value, f"{path}[{key!r}]", visit) for key, value in data.items()}
    if isinstance(data, tuple | list):
        items = [_walk(value, f"{path}[{number}]", visit) for number, value in enumerate(data)]
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    return visit(data, path)


def collate_rows(rows: Sequence[Any]) -> Any:
    """A batch of examples: dicts become a dict of columns; anything else goes through torch's default_collate."""
    if rows and all(type(row) is dict for row in rows):
        names = rows[0].keys()
        for row in rows:
            if row.keys() != names:
                raise DataError(
                    f"Examples differ in their fields: {sorted(names)} and {sorted(row)}.",
                    fix=["the same fields in every example", "collate=your_function"],
                )
        return collate_columns({name: [row[name] for row in rows] for name in names})
    return torch.utils.data.default_collate(list(rows))


def collate_columns(columns: dict[str, Any]) -> dict[str, Any]:
    """Lists of values become tensors if they are numbers of one shape; text and ragged values stay lists."""
    return {name: _column(values) for name, values in columns.items()}


def _column(values: Any) -> Any:
    if isinstance(values, Tensor):
        return values
    if isinstance(values, np.ndarray):
        return torch.from_numpy(values.copy()) if values.dtype.kind in "biufc" else list(values)
    if values and all(is_array(value) for value in values):
        tensors = [torch.as_tensor(value) for value in values]
        return torch.stack(tensors) if len({tensor.shape for tensor in tensors}) == 1 else tensors
    return _numbers(values)


def _numbers(values: list[Any]) -> Any:
    try:
        array = np.asarray(values)
    except ValueError:  # ragged
        return values
    if array.dtype.kind not in "biuf":
        return values
    # Python floats are doubles because Python has no other float; models use float32.
    return torch.from_numpy(array.astype(np.float32) if array.dtype.kind == "f" else array)
