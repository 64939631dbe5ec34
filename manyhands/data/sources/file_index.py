"""Files by path: what each one has, found once, and those that were read last, open.

To know how many lines a text file has, it must be read. Workers that have the same files divide that among them
(`FileIndex.share`): each looks into its part of the files, and they exchange what they found. `file_formats` opens
files.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from manyhands.data.row_exchange import RowExchange, decode, encode
from manyhands.data.sources.file_formats import ColumnFile, LineFile, open_file
from manyhands.errors import DataError

__all__ = ["FileIndex", "ListedFile"]

# A memory-mapped file keeps a file descriptor; a process may have about a thousand.
_MAX_OPEN = 256


class ListedFile(msgspec.Struct, frozen=True, array_like=True):
    """A file as one worker sees it."""

    name: str
    rows: int
    size: int
    schema: str


def _check_size(path: str, size: int) -> None:
    try:
        now = os.stat(path).st_size
    except FileNotFoundError:
        return  # what is mapped stays readable
    if now != size:
        raise _changed(path, size, now)


def _changed(path: str, before: int, now: int) -> DataError:
    return DataError(
        f"{path} has changed since the run began: it had {before} bytes, and has {now}.",
        fix=["files that stay as they are while a run reads them", "another file for new rows, and another run"],
    )


class FileIndex:
    """Safe from any thread. A copy that is sent to another process has nothing open."""

    def __init__(self) -> None:
        self._listed: dict[str, ListedFile] = {}
        self._opened: dict[str, ColumnFile | LineFile] = {}
        self._opening = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"_listed": dict(self._listed)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self._listed = state["_listed"]

    def __len__(self) -> int:
        """How many files are open."""
        return len(self._opened)

    def listed(self, path: str) -> ListedFile:
        """What a file has; it is opened if that is not known."""
        found = self._listed.get(path)
        if found is None:
            file = self.open(path)
            self._listed[path] = found = ListedFile(path, file.num_rows, file.size, file.schema)
        return found

    def share(self, paths: Sequence[str], exchange: RowExchange) -> None:
        """Look into this worker's part of the files, and learn of the others from the other workers.

        Every worker calls this with the same paths.
        """
        token = os.urandom(16)
        rank_of = exchange.all_gather_bytes("data/index", encode(token))
        rank, world_size = [decode(one) for one in rank_of].index(token), len(rank_of)
        own = [msgspec.to_builtins(self.listed(path)) for path in paths[rank::world_size]]
        for answer in exchange.all_gather_bytes("data/files", encode(own)):
            for file in msgspec.convert(decode(answer), list[ListedFile]):
                self._listed[file.name] = file

    def open(self, path: str) -> ColumnFile | LineFile:
        """The file, opened now if it is not open."""
        with self._opening:
            opened = self._opened.pop(path, None)
            if opened is None:
                opened = open_file(Path(path))
                listed = self._listed.get(path)
                if listed is not None and (listed.rows, listed.size) != (opened.num_rows, opened.size):
                    raise _changed(path, listed.size, opened.size)
            elif not opened.in_memory:
                # Reading beyond the end of a mapped file that was cut ends the process.
                _check_size(path, opened.size)
            self._opened[path] = opened  # newest last
            mapped = [other for other, file in self._opened.items() if not file.in_memory]
            if len(mapped) > _MAX_OPEN:
                del self._opened[mapped[0]]
            return opened
