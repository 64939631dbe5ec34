"""File formats: rows of columns (.npy, .npz, .safetensors, .csv) or lines (.jsonl, .txt).

If the format allows, a file is opened without reading it: arrays are memory-mapped, lines are found by their offsets.
Nothing is unpickled. `read` returns rows in a raw form that can be sent to another worker; `finish` collates a batch.
"""

from __future__ import annotations

import csv
import json
import math
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from manyhands.data.sources.columns import collate_rows
from manyhands.errors import DataError

__all__ = [
    "ENDINGS",
    "LINES",
    "ColumnFile",
    "LineFile",
    "Part",
    "UnreadableLine",
    "examples",
    "finish",
    "merge",
    "open_file",
]

Array = npt.NDArray[Any]
Part = dict[str, Array] | list[bytes]
"""Rows in raw form: columns by name (one named "" is the whole row), or lines."""

_SAFETENSORS_TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "<u1", "BOOL": "|b1",
}  # fmt: skip
_MAX_HEADER_BYTES = 100 * 2**20
_SCAN_BYTES = 16 * 2**20
_BOM = b"\xef\xbb\xbf"
_EXACT_FLOAT32, _EXACT_FLOAT64 = 2**24, 2**53


class ColumnFile:
    """Arrays that share their first dimension."""

    def __init__(self, path: Path, columns: dict[str, Array], bfloat16: frozenset[str] = frozenset()) -> None:
        rows = {name: array.shape[0] if array.ndim else 0 for name, array in columns.items()}
        if not rows or len(set(rows.values())) > 1 or any(not array.ndim for array in columns.values()):
            raise DataError(f"{path}: columns must have the same first dimension, but it is {rows}.")
        self._columns, self.num_rows = columns, next(iter(rows.values()))
        self.size = path.stat().st_size
        self.in_memory = not all(isinstance(array, np.memmap) for array in columns.values())
        types = {name: "bfloat16" if name in bfloat16 else array.dtype.str for name, array in columns.items()}
        self.schema = json.dumps({name: [types[name], array.shape[1:]] for name, array in sorted(columns.items())})

    def read(self, rows: npt.NDArray[np.int64]) -> Part:
        return {name: np.asarray(array[rows]) for name, array in self._columns.items()}


class UnreadableLine(ValueError):
    """A line that is no UTF-8 or no JSON: which of those that were read, and why."""

    def __init__(self, index: int, kind: str, why: Exception) -> None:
        super().__init__(f"{kind}: {why}")
        self.index = index


class LineFile:
    """Lines of text. A .jsonl row is a line that is not blank; a .txt row is any line."""

    in_memory = False

    def __init__(self, path: Path) -> None:
        self.schema = path.suffix.lower()
        self.size = path.stat().st_size
        self._bytes = np.memmap(path, np.uint8, "r") if self.size else np.empty(0, np.uint8)
        self._starts, self._stops = _find_lines(self._bytes)
        if self._bytes[: len(_BOM)].tobytes() == _BOM:
            self._starts[0] = len(_BOM)
        if self.schema == ".jsonl":
            filled = np.array([bool(self._line(row).strip()) for row in range(len(self._starts))], dtype=bool)
            self._starts, self._stops = self._starts[filled], self._stops[filled]
        self.num_rows = len(self._starts)

    def read(self, rows: npt.NDArray[np.int64]) -> Part:
        return [self._line(row) for row in rows.tolist()]

    def line_number(self, row: int) -> int:
        """Where a row is in the file, from 1, as editors count."""
        return int(np.count_nonzero(self._bytes[: self._starts[row]] == ord("\n"))) + 1

    def _line(self, row: int) -> bytes:
        return bytes(self._bytes[self._starts[row] : self._stops[row]].tobytes().rstrip(b"\r"))


def _find_lines(data: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    blocks = range(0, len(data), _SCAN_BYTES)
    ends = [np.flatnonzero(data[start : start + _SCAN_BYTES] == ord("\n")) + start for start in blocks]
    if len(data) and data[-1] != ord("\n"):
        ends.append(np.array([len(data)]))
    stops = np.concatenate(ends).astype(np.int64) if ends else np.empty(0, np.int64)
    return np.concatenate([[0], stops[:-1] + 1]).astype(np.int64)[: len(stops)], stops


def open_file(path: Path) -> ColumnFile | LineFile:
    opener = _OPENERS.get(path.suffix.lower())
    if opener is None:
        raise DataError(
            f"{path}: {path.suffix or 'no ending'} is not a known kind of file.", fix=[f"*{s}" for s in _OPENERS]
        )
    try:
        return opener(path)
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile, OSError) as error:
        raise DataError(f"{path} cannot be read as {path.suffix}: {error}") from error


def _open_npy(path: Path) -> ColumnFile:
    return ColumnFile(path, {"": np.load(path, mmap_mode="r", allow_pickle=False)})


def _open_npz(path: Path) -> ColumnFile:
    with zipfile.ZipFile(path) as archive, open(path, "rb") as raw:
        return ColumnFile(
            path, {info.filename.removesuffix(".npy"): _npz_column(archive, info, raw) for info in archive.infolist()}
        )


def _npz_column(archive: zipfile.ZipFile, info: zipfile.ZipInfo, raw: BinaryIO) -> Array:
    """Memory-mapped within the archive, unless it is compressed."""
    if info.compress_type != zipfile.ZIP_STORED:
        with archive.open(info) as member:
            return np.lib.format.read_array(member, allow_pickle=False)
    raw.seek(info.header_offset + 26)
    name_bytes, extra_bytes = (int.from_bytes(raw.read(2), "little") for _ in range(2))
    raw.seek(name_bytes + extra_bytes, 1)
    version = np.lib.format.read_magic(raw)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read_header(raw)
    if dtype.hasobject:
        raise ValueError(f"column {info.filename} holds Python objects")
    return np.memmap(str(archive.filename), dtype, "r", raw.tell(), shape, "F" if fortran else "C")


def _open_safetensors(path: Path) -> ColumnFile:
    size = path.stat().st_size
    with open(path, "rb") as raw:
        header_bytes = int.from_bytes(raw.read(8), "little")
        if header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"its header claims {header_bytes} bytes")
        header = msgspec.json.decode(raw.read(header_bytes))
    header.pop("__metadata__", None)
    bfloat16 = frozenset(name for name, entry in header.items() if entry["dtype"] == "BF16")
    columns = {name: _safetensors_column(path, size, 8 + header_bytes, entry) for name, entry in header.items()}
    return ColumnFile(path, columns, bfloat16)


def _safetensors_column(path: Path, size: int, start: int, entry: dict[str, Any]) -> Array:
    dtype = np.dtype("<i2" if entry["dtype"] == "BF16" else _SAFETENSORS_TYPES[entry["dtype"]])
    low, high = entry["data_offsets"]
    if high - low != dtype.itemsize * math.prod(entry["shape"]) or not 0 <= low <= high <= size - start:
        raise ValueError("a tensor lies outside the file")
    if high == low:
        return np.empty(entry["shape"], dtype)
    return np.memmap(path, dtype, "r", start + low, tuple(entry["shape"]))


def _open_csv(path: Path) -> ColumnFile:
    """float32 numbers. With a header line, one column per name; without, a row is a vector."""
    with open(path, newline="", encoding="utf-8-sig") as lines:
        first = [field.strip() for field in next(csv.reader(lines), [])]
    named = any(not _is_number(field) for field in first)
    if named and len(set(first)) < len(first):
        raise ValueError(f"several columns have one name: {', '.join(first)}")
    exact = np.loadtxt(
        path,
        np.float64,
        delimiter=",",
        skiprows=int(named),
        ndmin=2,
        encoding="utf-8-sig",
        comments=None,
        quotechar='"',
    )
    table = exact.astype(np.float32)
    _warn_of_rounded(path, exact, table, first if named else [])
    if not named:
        return ColumnFile(path, {"": table})
    table = table.reshape(-1, len(first))
    return ColumnFile(path, {name: np.ascontiguousarray(table[:, n]) for n, name in enumerate(first)})


def _warn_of_rounded(path: Path, exact: Array, table: Array, names: list[str]) -> None:
    """Fractions are rounded in any case; whole numbers that float32 does not have may be identifiers."""
    large = (np.abs(exact) > _EXACT_FLOAT32) & (np.abs(exact) <= _EXACT_FLOAT64)
    rounded = np.argwhere(large & (exact == np.floor(exact)) & (table != exact))
    if len(rounded):
        row, column = rounded[0].tolist()
        name = names[column] if names else f"{column + 1}"
        warnings.warn(
            f"{path}: column {name} has {exact[row, column]:.0f}, which becomes {table[row, column]:.0f}: a .csv file "
            "is read as float32, which has whole numbers up to 16777216. Identifiers can be kept in a .npy file.",
            stacklevel=2,
        )


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


_OPENERS: dict[str, Callable[[Path], ColumnFile | LineFile]] = {
    ".npy": _open_npy,
    ".npz": _open_npz,
    ".safetensors": _open_safetensors,
    ".csv": _open_csv,
    ".jsonl": LineFile,
    ".txt": LineFile,
}
ENDINGS = tuple(_OPENERS)
LINES = (".jsonl", ".txt")
"""Kinds whose schema is their ending."""


def merge(parts: list[tuple[npt.NDArray[np.int64], Part]], count: int) -> Part:
    """One part of `count` rows from several, each with the indices of its rows in the result."""
    lines: list[bytes] = [b""] * count
    columns: dict[str, Array] = {}
    for indices, part in parts:
        if isinstance(part, list):
            for index, line in zip(indices.tolist(), part, strict=True):
                lines[index] = line
            continue
        for name, array in part.items():
            if name not in columns:
                columns[name] = np.empty((count, *array.shape[1:]), array.dtype)
            columns[name][indices] = array
    return columns or lines


def finish(part: Part, schema: str) -> Any:
    """A batch: a tensor or a dict of tensors; for .jsonl, `collate_rows` of it; for .txt, a list of strings."""
    if isinstance(part, list):
        return examples(part, schema) if schema == ".txt" else collate_rows(examples(part, schema))
    types = json.loads(schema)
    tensors = {name: _tensor(array, types[name][0]) for name, array in part.items()}
    return tensors[""] if list(tensors) == [""] else tensors


def examples(part: Part, schema: str) -> list[Any]:
    """The same rows as a list, for a user's collate function."""
    if isinstance(part, list):
        return [_decoded(line, schema, index) for index, line in enumerate(part)]
    batch = finish(part, schema)
    if isinstance(batch, torch.Tensor):
        return list(batch)
    return [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]


def _decoded(line: bytes, schema: str, index: int) -> Any:
    try:
        return line.decode("utf-8") if schema == ".txt" else msgspec.json.decode(line)
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise UnreadableLine(index, "UTF-8" if schema == ".txt" else "JSON", error) from error


def _tensor(array: Array, dtype: str) -> torch.Tensor:
    native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    tensor = torch.from_numpy(native if native.flags.writeable else native.copy())
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
