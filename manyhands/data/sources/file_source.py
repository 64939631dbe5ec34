"""A glob of files as data with row numbers. Rows are numbered through all files in name order, so the order is pure.

Workers on different hosts may see different files: with an exchange, the data is the union of all workers' files, and
rows that a worker lacks are sent to it by a worker that has them (`take_together`). Nothing is sent if every worker has
every file. `file_formats` reads the files.
"""

from __future__ import annotations

import functools
import glob
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from manyhands.data.row_exchange import RowExchange, decode, encode
from manyhands.data.sources.file_formats import (
    LINES,
    ColumnFile,
    LineFile,
    Part,
    UnreadableLine,
    examples,
    finish,
    merge,
)
from manyhands.data.sources.file_index import FileIndex, ListedFile
from manyhands.data.sources.row_source import Collate
from manyhands.errors import DataError

__all__ = ["FileRows", "open_files", "open_listed"]

Rows = npt.NDArray[np.int64]


def open_files(pattern: str, collate: Collate | None, exchange: RowExchange | None, *, host: int = 0) -> FileRows:
    """The files that match the pattern on this host; with an exchange, on all hosts."""
    paths = _matching(pattern)
    index = FileIndex()
    own = [msgspec.structs.replace(index.listed(str(path)), name=name) for name, path in paths.items()]
    hosts, listings, rank = _gather(own, exchange, host)
    files = _union(pattern, hosts, listings)
    names = [{file.name for file in listing} for listing in listings]
    has_file = np.array([[file.name in listing for file in files] for listing in names], dtype=bool)
    return FileRows(files, [paths.get(file.name) for file in files], has_file, rank, collate, index)


def open_listed(paths: Sequence[str], index: FileIndex) -> FileRows:
    """These files, in this order; every worker has all of them."""
    files = [index.listed(path) for path in paths]
    _check_one_schema(files)
    return FileRows(files, [Path(path) for path in paths], np.ones((1, len(files)), dtype=bool), 0, None, index)


def _matching(pattern: str) -> dict[str, Path]:
    """The files that match, by their name relative to the fixed part of the pattern."""
    if os.path.isdir(pattern):
        raise DataError(f"{pattern} is a directory, which does not say which files.", fix=[f'"{pattern}/*.npy"'])
    base = Path()
    for part in Path(pattern).parent.parts:
        if glob.has_magic(part):
            break
        base /= part
    found = [Path(name) for name in glob.glob(pattern, recursive=True) if os.path.isfile(name)]
    return {path.relative_to(base).as_posix(): path for path in found}


def _gather(
    own: list[ListedFile], exchange: RowExchange | None, host: int
) -> tuple[list[int], list[list[ListedFile]], int]:
    """Every worker's host and listing, and this worker's rank."""
    if exchange is None:
        return [host], [own], 0
    token = os.urandom(16)
    answers = exchange.all_gather_bytes(
        "data/files", encode([token, host, [msgspec.to_builtins(file) for file in own]])
    )
    listings = [decode(answer) for answer in answers]
    rank = next(number for number, listing in enumerate(listings) if listing[0] == token)
    hosts = [listing[1] for listing in listings]
    return hosts, [msgspec.convert(listing[2], list[ListedFile]) for listing in listings], rank


def _union(pattern: str, hosts: list[int], listings: list[list[ListedFile]]) -> list[ListedFile]:
    seen: dict[str, tuple[ListedFile, int]] = {}
    for host, listing in zip(hosts, listings, strict=True):
        for file in listing:
            first, where = seen.setdefault(file.name, (file, host))
            if first != file:
                raise DataError(
                    f"{file.name} has {first.size} bytes and {first.rows} rows on host {where}, "
                    f"but {file.size} bytes and {file.rows} rows on host {host}.",
                    fix=["one version of each file on all hosts"],
                )
    if not seen:
        raise DataError(
            f"No file matches {pattern}.", fix=["the path as seen from where the command runs", '"data/*.npy"']
        )
    files = [seen[name][0] for name in sorted(seen)]
    _check_one_schema(files)
    return files


def _check_one_schema(files: list[ListedFile]) -> None:
    for file in files:
        if file.schema != files[0].schema:
            raise DataError(
                f"Files differ in what a row is: {files[0].name} has {files[0].schema}, {file.name} has {file.schema}.",
                fix=["a pattern that matches files of one kind"],
            )


class FileRows:
    """Rows of many files. `has_file[rank, file]`: whether that rank has the file."""

    def __init__(
        self,
        files: list[ListedFile],
        paths: list[Path | None],
        has_file: npt.NDArray[np.bool_],
        rank: int,
        collate: Collate | None,
        index: FileIndex,
    ) -> None:
        self._files, self._paths, self._has_file, self._rank, self._collate = files, paths, has_file, rank, collate
        self._ends = np.cumsum([file.rows for file in files])
        self.num_rows = int(self._ends[-1])
        self.complete = bool(has_file.all())
        """Whether every worker has every file."""
        self.has_lines = files[0].schema in LINES
        """Whether rows are lines, not rows of columns."""
        self._index = index

    def take(self, rows: Rows) -> Any:
        """A batch of rows that this worker has."""
        lacking = rows[~self._has_file[self._rank, self._file_of(rows)]]
        if lacking.size:
            name = self._files[int(self._file_of(lacking[:1])[0])].name
            raise DataError(f"Row {lacking[0]} is in {name}, which this host does not have.")
        return self._batch(self._read(rows), rows)

    def examples(self, rows: Rows) -> list[Any]:
        """The same one by one; only if every worker has every file."""
        assert self.complete
        with self._naming(rows):
            return examples(self._read(rows), self._files[0].schema)

    def take_together(self, wanted: list[list[Rows]], exchange: RowExchange, name: str) -> list[Callable[[], Any]]:
        """Batches of the rows `wanted`, by rank; every worker calls this with the same arguments and gets its own.

        Every worker computes the same assignment of senders, so there is one message per worker, or none if no worker
        lacks a row. Batches are collated when called, under the randomness that is set then.
        """
        joined = [np.concatenate(lists) if lists else np.empty(0, np.int64) for lists in wanted]
        parts = [self._sent(joined, provider) for provider in range(len(wanted))]
        if not any(indices.size for sent in parts for indices in sent):
            return [functools.partial(self.take, rows) for rows in wanted[self._rank]]
        message = {
            str(to): self._read(joined[to][indices]) for to, indices in enumerate(parts[self._rank]) if indices.size
        }
        answers = [decode(answer) for answer in exchange.all_gather_bytes(name, encode(message))]
        rows = joined[self._rank]
        own = np.flatnonzero(self._has_file[self._rank, self._file_of(rows)])
        received = [
            (indices, answers[provider][str(self._rank)])
            for provider in range(len(wanted))
            if (indices := parts[provider][self._rank]).size
        ]
        mine = [(own, self._read(rows[own]))] if own.size else []
        whole = merge([*mine, *received], len(rows))
        edges = np.cumsum([len(rows) for rows in wanted[self._rank]])[:-1]
        pieces = _cut(whole, edges.tolist(), len(rows)) if wanted[self._rank] else []
        return [functools.partial(self._batch, *pair) for pair in zip(pieces, wanted[self._rank], strict=True)]

    def _sent(self, joined: list[Rows], provider: int) -> list[Rows]:
        """For each worker, the indices among its rows that `provider` sends."""
        return [
            np.flatnonzero(self._provider_of(rank, self._file_of(rows)) == provider) for rank, rows in enumerate(joined)
        ]

    def _provider_of(self, rank: int, files: Rows) -> Rows:
        """Which rank sends `rank` the rows of these files; -1 if it has them. Spread over the ranks that have them."""
        providers = np.full(len(self._files), -1)
        for file in np.unique(files):
            if not self._has_file[rank, file]:
                holders = np.flatnonzero(self._has_file[:, file])
                providers[file] = holders[rank % len(holders)]
        return providers[files]

    def _file_of(self, rows: Rows) -> Rows:
        return np.searchsorted(self._ends, rows, side="right")

    def _read(self, rows: Rows) -> Part:
        files = self._file_of(rows)
        parts = []
        for file in np.unique(files).tolist():
            indices = np.flatnonzero(files == file)
            first = int(self._ends[file]) - self._files[file].rows
            parts.append((indices, self._open(file).read(rows[indices] - first)))
        return merge(parts, len(rows))

    def _open(self, file: int) -> ColumnFile | LineFile:
        path = self._paths[file]
        assert path is not None, "only files of this host are read"
        return self._index.open(str(path))

    def _batch(self, part: Part, rows: Rows) -> Any:
        schema = self._files[0].schema
        with self._naming(rows):
            if self._collate is None:
                return finish(part, schema)
            found = examples(part, schema)
        return self._collate(found)

    @contextmanager
    def _naming(self, rows: Rows) -> Iterator[None]:
        """Inside, a line that cannot be read becomes an error that says which of which file it is."""
        try:
            yield
        except UnreadableLine as error:
            row = int(rows[error.index])
            file = int(self._file_of(np.array([row]))[0])
            within, name = row - int(self._ends[file]) + self._files[file].rows, self._files[file].name
            opened = self._open(file) if self._paths[file] is not None else None
            line = opened.line_number(within) if isinstance(opened, LineFile) else within + 1
            raise DataError(
                f"{name}, line {line}, cannot be read as {error}",
                fix=["a file of UTF-8 text", "one whole JSON value on each line, in .jsonl"],
            ) from error


def _cut(part: Part, edges: list[int], count: int) -> list[Part]:
    spans = list(zip([0, *edges], [*edges, count], strict=True))
    if isinstance(part, list):
        return [part[low:high] for low, high in spans]
    return [{name: array[low:high] for name, array in part.items()} for low, high in spans]
