"""A glob of files as rows by number. Rows are numbered through all files, sorted by name, so the order is pure.

Workers on different hosts may see different files: with an exchange, the files of all workers together are the data,
and rows that a worker lacks are sent to it by one that has them (`take_together`). Nothing is sent where every
worker has every file. What is in a file is `file_formats`.
"""

from __future__ import annotations

import functools
import glob
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from manyhands.data.row_exchange import RowExchange, decode, encode
from manyhands.data.sources.file_formats import ColumnFile, LineFile, Part, examples, finish, merge, open_file
from manyhands.data.sources.row_source import Collate
from manyhands.errors import DataError

__all__ = ["Files", "open_files"]

Rows = npt.NDArray[np.int64]
# A mapped file keeps a file descriptor; a process may have about a thousand.
_MOST_OPEN = 256


class _Listed(msgspec.Struct, frozen=True, array_like=True):
    """A file as one worker sees it."""

    name: str
    rows: int
    size: int
    schema: str


def open_files(pattern: str, collate: Collate | None, exchange: RowExchange | None, *, host: int = 0) -> Files:
    """What this host has of a pattern; with an exchange, together with what the others have."""
    paths = _matching(pattern)
    own = []
    for name, path in paths.items():
        file = open_file(path)
        own.append(_Listed(name, file.num_rows, file.size, file.schema))
    hosts, listings, rank = _gather(own, exchange, host)
    files = _union(pattern, hosts, listings)
    names = [{file.name for file in listing} for listing in listings]
    held = np.array([[file.name in listing for file in files] for listing in names], dtype=bool)
    return Files(files, [paths.get(file.name) for file in files], held, rank, collate)


def _matching(pattern: str) -> dict[str, Path]:
    """The files that match, by their name below the fixed part of the pattern."""
    if os.path.isdir(pattern):
        raise DataError(f"{pattern} is a directory, which does not say which files.", fix=[f'"{pattern}/*.npy"'])
    base = Path()
    for part in Path(pattern).parent.parts:
        if glob.has_magic(part):
            break
        base /= part
    found = [Path(name) for name in glob.glob(pattern, recursive=True) if os.path.isfile(name)]
    return {path.relative_to(base).as_posix(): path for path in found}


def _gather(own: list[_Listed], exchange: RowExchange | None, host: int) -> tuple[list[int], list[list[_Listed]], int]:
    """Every worker's host and listing, and which of them is ours."""
    if exchange is None:
        return [host], [own], 0
    token = os.urandom(16)
    answers = exchange.all_gather_bytes(
        "data/files", encode([token, host, [msgspec.to_builtins(file) for file in own]])
    )
    told = [decode(answer) for answer in answers]
    rank = next(number for number, answer in enumerate(told) if answer[0] == token)
    return [answer[1] for answer in told], [msgspec.convert(answer[2], list[_Listed]) for answer in told], rank


def _union(pattern: str, hosts: list[int], listings: list[list[_Listed]]) -> list[_Listed]:
    seen: dict[str, tuple[_Listed, int]] = {}
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
    for file in files:
        if file.schema != files[0].schema:
            raise DataError(
                f"Files differ in what a row is: {files[0].name} has {files[0].schema}, {file.name} has {file.schema}.",
                fix=["a pattern that matches files of one kind"],
            )
    return files


class Files:
    """Rows of many files. `held[rank, file]` says who has what."""

    def __init__(
        self,
        files: list[_Listed],
        paths: list[Path | None],
        held: npt.NDArray[np.bool_],
        rank: int,
        collate: Collate | None,
    ) -> None:
        self._files, self._paths, self._held, self._rank, self._collate = files, paths, held, rank, collate
        self._ends = np.cumsum([file.rows for file in files])
        self.num_rows = int(self._ends[-1])
        self.complete = bool(held.all())
        """Whether every worker has every file."""
        self._opened: dict[int, ColumnFile | LineFile] = {}
        self._opening = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}, "_opening": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _opening=threading.Lock())

    def take(self, rows: Rows) -> Any:
        """A batch of rows that this worker has."""
        lacking = rows[~self._held[self._rank, self._file_of(rows)]]
        if lacking.size:
            name = self._files[int(self._file_of(lacking[:1])[0])].name
            raise DataError(f"Row {lacking[0]} is in {name}, which this host does not have.")
        return self._batch(self._read(rows))

    def take_together(self, wanted: list[list[Rows]], exchange: RowExchange, name: str) -> list[Callable[[], Any]]:
        """What each worker wants (by rank); every worker calls this with the same arguments and gets its own batches.

        Who sends what is arithmetic that all do alike, so there is one message per worker, or none if nobody
        lacks anything. Batches are collated when called for, under whatever randomness is set then.
        """
        joined = [np.concatenate(lists) if lists else np.empty(0, np.int64) for lists in wanted]
        parts = [self._sent(joined, provider) for provider in range(len(wanted))]
        if not any(places.size for sent in parts for places in sent):
            return [functools.partial(self.take, rows) for rows in wanted[self._rank]]
        message = {
            str(to): self._read(joined[to][places]) for to, places in enumerate(parts[self._rank]) if places.size
        }
        answers = [decode(answer) for answer in exchange.all_gather_bytes(name, encode(message))]
        rows = joined[self._rank]
        own = np.flatnonzero(self._held[self._rank, self._file_of(rows)])
        received = [
            (places, answers[provider][str(self._rank)])
            for provider in range(len(wanted))
            if (places := parts[provider][self._rank]).size
        ]
        mine = [(own, self._read(rows[own]))] if own.size else []
        whole = merge([*mine, *received], len(rows))
        edges = np.cumsum([len(rows) for rows in wanted[self._rank]])[:-1]
        pieces = _cut(whole, edges.tolist(), len(rows)) if wanted[self._rank] else []
        return [functools.partial(self._batch, piece) for piece in pieces]

    def _sent(self, joined: list[Rows], provider: int) -> list[Rows]:
        """For each worker, the places among its rows that `provider` sends it."""
        return [
            np.flatnonzero(self._provider_of(rank, self._file_of(rows)) == provider) for rank, rows in enumerate(joined)
        ]

    def _provider_of(self, rank: int, files: Rows) -> Rows:
        """Who sends `rank` the rows of these files; -1 where it has them. Requests are spread over those who can."""
        providers = np.full(len(self._files), -1)
        for file in np.unique(files):
            if not self._held[rank, file]:
                holders = np.flatnonzero(self._held[:, file])
                providers[file] = holders[rank % len(holders)]
        return providers[files]

    def _file_of(self, rows: Rows) -> Rows:
        return np.searchsorted(self._ends, rows, side="right")

    def _read(self, rows: Rows) -> Part:
        files = self._file_of(rows)
        parts = []
        for file in np.unique(files).tolist():
            places = np.flatnonzero(files == file)
            first = int(self._ends[file]) - self._files[file].rows
            parts.append((places, self._open(file).read(rows[places] - first)))
        return merge(parts, len(rows))

    def _open(self, file: int) -> ColumnFile | LineFile:
        with self._opening:
            opened = self._opened.pop(file, None)
            if opened is None:
                path = self._paths[file]
                assert path is not None, "only held files are read"
                opened = open_file(path)
            self._opened[file] = opened  # newest last
            mapped = [number for number, other in self._opened.items() if not other.in_memory]
            if len(mapped) > _MOST_OPEN:
                del self._opened[mapped[0]]
            return opened

    def _batch(self, part: Part) -> Any:
        schema = self._files[0].schema
        return finish(part, schema) if self._collate is None else self._collate(examples(part, schema))


def _cut(part: Part, edges: list[int], count: int) -> list[Part]:
    spans = list(zip([0, *edges], [*edges, count], strict=True))
    if isinstance(part, list):
        return [part[low:high] for low, high in spans]
    return [{name: array[low:high] for name, array in part.items()} for low, high in spans]
