"""Where the examples of a chain are: tensors, plain values, files of rows, pictures, Parquet row groups.

Every leaf reads single rows by number, so a worker reads what its slices need: the bytes of its lines and array rows,
its pictures, and the row groups that its rows are in. Leaves are sent to loader processes without what they have open.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch

from manyhands.data.pipeline.elements import row_of, stacked
from manyhands.data.pipeline.stages import ColumnsStage, FilesStage, NamesStage, RangeStage, Stage
from manyhands.data.sample_order import Rows
from manyhands.data.sources.columns import ColumnTable
from manyhands.data.sources.file_index import FileIndex
from manyhands.data.sources.file_source import open_listed
from manyhands.errors import DataError

__all__ = [
    "PARQUET",
    "PICTURES",
    "Leaf",
    "class_folders",
    "class_of",
    "extra",
    "is_in_memory",
    "open_leaf",
    "picture",
    "row_groups",
]

PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm")
PARQUET = ".parquet"
_OPEN_GROUPS = 2
_OPEN_FILES = 64


class Leaf(Protocol):
    """Rows that do not depend on the epoch."""

    @property
    def length(self) -> int: ...

    def take(self, rows: Rows) -> Any:
        """A batch of these rows."""

    def values(self, rows: Rows) -> list[Any]:
        """The same, one by one."""


class ValueLeaf:
    """Plain values in memory."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values, self.length = values, len(values)

    def take(self, rows: Rows) -> Any:
        return stacked(self.values(rows))

    def values(self, rows: Rows) -> list[Any]:
        return [self._values[row] for row in rows.tolist()]


class ColumnLeaf:
    """Rows of tensors and arrays; memory-mapped ones stay on disk."""

    def __init__(self, table: ColumnTable) -> None:
        self._table, self.length, self.in_memory = table, table.num_rows, table.in_memory

    def take(self, rows: Rows) -> Any:
        return self._table.take(rows)

    def values(self, rows: Rows) -> list[Any]:
        batch = self._table.take(rows)
        return [row_of(batch, number) for number in range(len(rows))]


class FileLeaf:
    """Rows of the files that `data.sources.file_formats` reads."""

    def __init__(self, paths: Sequence[str], index: FileIndex) -> None:
        self._files = open_listed(paths, index)
        self.length = self._files.num_rows

    def take(self, rows: Rows) -> Any:
        # A batch is the same whether its rows come from here, or through a map.
        return stacked(self.values(rows)) if self._files.has_lines else self._files.take(rows)

    def values(self, rows: Rows) -> list[Any]:
        return self._files.examples(rows)


class PictureLeaf:
    """A picture, or with labels a pair of picture and label."""

    def __init__(self, paths: Sequence[str], labels: Sequence[int] | None) -> None:
        self._paths, self._labels, self.length = paths, labels, len(paths)
        extra("PIL.Image", "images", "pillow", "decodes pictures")

    def take(self, rows: Rows) -> Any:
        return stacked(self.values(rows))

    def values(self, rows: Rows) -> list[Any]:
        numbers = rows.tolist()
        pictures = [picture(self._paths[row]) for row in numbers]
        if self._labels is None:
            return pictures
        return [(pixels, self._labels[row]) for pixels, row in zip(pictures, numbers, strict=True)]


def picture(path: str) -> torch.Tensor:
    """A picture file as uint8, channels (red, green, blue) by height by width."""
    pillow: Any = extra("PIL.Image", "images", "pillow", "decodes pictures")
    try:
        with pillow.open(path) as file:
            pixels = np.array(_eight_bits(file, pillow).convert("RGB"))
    except pillow.DecompressionBombError as error:
        raise DataError(
            f"{path} cannot be read as a picture: {error}",
            fix=["a smaller copy of it", "PIL.Image.MAX_IMAGE_PIXELS = None, for pictures that you trust"],
        ) from error
    except Exception as error:  # of many types, for broken files
        raise DataError(f"{path} cannot be read as a picture: {error}", fix=["the pictures without it"]) from error
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def _eight_bits(file: Any, pillow: Any) -> Any:
    """The picture with 8 bits per channel; pillow's own conversion makes all but the darkest of 16 bits white."""
    if file.mode == "F":
        raise ValueError("its values are fractions, without a largest one")
    return pillow.fromarray((np.asarray(file) >> 8).astype(np.uint8)) if file.mode.startswith("I") else file


class ParquetLeaf:
    """Rows of Parquet files, or of some of their row groups ("a.parquet#3"); a row is a dict.

    A row group is decoded as a whole, so rows should come in an order that leaves those of a group together.
    """

    def __init__(self, paths: Sequence[str], columns: Sequence[str] | None) -> None:
        self._columns = list(columns) if columns else None
        self._groups: list[tuple[str, int]] = []
        lengths: list[int] = []
        for path in paths:
            file, _, chosen = path.partition("#")
            sizes = _group_sizes(file)
            for number in [int(chosen)] if chosen else range(len(sizes)):
                self._groups.append((file, number))
                lengths.append(sizes[number])
        self._ends = np.cumsum(lengths, dtype=np.int64)
        self.length = int(self._ends[-1]) if lengths else 0
        self._opened: dict[str, Any] = {}
        self._decoded: dict[int, Any] = {}
        self._reading = threading.Lock()  # a prefetch thread reads, too

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}, "_decoded": {}, "_reading": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _reading=threading.Lock())

    def take(self, rows: Rows) -> Any:
        return stacked(self.values(rows))

    def values(self, rows: Rows) -> list[Any]:
        found: list[Any] = [None] * len(rows)
        groups = np.searchsorted(self._ends, rows, side="right")
        for group in np.unique(groups).tolist():
            indices = np.flatnonzero(groups == group)
            with self._reading:
                table = self._table(group)
            first = int(self._ends[group]) - table.num_rows
            for index, value in zip(indices.tolist(), table.take(rows[indices] - first).to_pylist(), strict=True):
                found[index] = value
        return found

    def _table(self, group: int) -> Any:
        table = self._decoded.pop(group, None)
        if table is None:
            path, number = self._groups[group]
            table = self._open(path).read_row_group(number, columns=self._columns)
        self._decoded[group] = table  # newest last
        if len(self._decoded) > _OPEN_GROUPS:
            self._decoded.pop(next(iter(self._decoded)), None)
        return table

    def _open(self, path: str) -> Any:
        if path not in self._opened:
            if len(self._opened) >= _OPEN_FILES:
                self._opened.pop(next(iter(self._opened)))
            self._opened[path] = parquet_file(path)
        return self._opened[path]


def parquet_file(path: str) -> Any:
    reader: Any = extra("pyarrow.parquet", "parquet", "pyarrow", "reads Parquet files")
    try:
        return reader.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a Parquet file: {error}") from error


def _group_sizes(path: str) -> list[int]:
    """Rows of each row group, from the end of the file: no row is read."""
    with parquet_file(path) as file:
        return [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]


def row_groups(path: str) -> list[str]:
    """The row groups of a Parquet file, as names for `ParquetLeaf`."""
    return [f"{path}#{number}" for number in range(len(_group_sizes(path)))]


def extra(module: str, name: str, package: str, what: str) -> ModuleType:
    """A module that an extra of manyhands installs; `DataError` that says so without it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"{package} {what}, but it cannot be imported: {error}.", fix=[f'pip install "manyhands[{name}]"']
        ) from error


def open_leaf(stage: ColumnsStage | RangeStage | NamesStage | FilesStage, index: FileIndex) -> Leaf:
    """What reads the rows of a source; `index` has the files that are counted by opening them."""
    match stage:
        case ColumnsStage():
            return ColumnLeaf(stage.table)
        case RangeStage():
            return ValueLeaf(range(stage.start, stage.stop, stage.step))
        case NamesStage():
            return ValueLeaf(stage.values)
        case FilesStage(kind="pictures"):
            return PictureLeaf(stage.paths, None if stage.folder is None else _labels(stage))
        case FilesStage(kind="parquet"):
            return ParquetLeaf(stage.paths, stage.columns)
        case _:
            return FileLeaf(stage.paths, index)


def is_in_memory(stage: Stage) -> bool:
    """Whether reading a source only copies memory."""
    if isinstance(stage, ColumnsStage):
        return bool(stage.table.in_memory)
    return isinstance(stage, RangeStage | NamesStage)


def class_folders(folder: str) -> list[str]:
    """The subfolders of a picture folder, in order of their names: an empty one is a class, a hidden one is not."""
    return sorted(one.name for one in os.scandir(folder) if one.is_dir() and not one.name.startswith("."))


def class_of(path: str, folder: str) -> str:
    return Path(path).relative_to(folder).parts[0]


def _labels(stage: FilesStage) -> list[int]:
    """The number of each picture's class: its subfolder's."""
    numbers = {name: number for number, name in enumerate(stage.classes)}
    return [numbers[class_of(path, str(stage.folder))] for path in stage.paths]
