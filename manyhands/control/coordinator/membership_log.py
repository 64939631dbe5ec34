"""The coordinator's log: the state of the run, on disk before any agent acts on it."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import msgspec

from manyhands.control.membership.state import Membership

__all__ = ["MembershipLog"]

# Only the last state counts. Weeks of changes and commits would make the log long, and a restart slow.
MAX_BYTES = 4 * 2**20


class MembershipLog:
    """States, one per line, each with a checksum; an incomplete last line is ignored. On disk before `append` returns.

    The first state that an object writes begins a new file, and so does one that would make it too long: nothing is
    ever written after an incomplete line of a predecessor.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._num_bytes: int | None = None

    def last(self) -> Membership | None:
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return None
        for line in reversed(lines):
            checksum, _, body = line.partition(b" ")
            if checksum == b"%08x" % zlib.crc32(body):
                return msgspec.json.decode(body, type=Membership)
        return None

    def append(self, state: Membership) -> None:
        body = msgspec.json.encode(state)
        line = b"%08x %s\n" % (zlib.crc32(body), body)
        if self._num_bytes is None or self._num_bytes + len(line) > self._max_bytes:
            self._begin_new_file(line)
        else:
            self._write(self._path, line)
            self._num_bytes += len(line)

    def _begin_new_file(self, line: bytes) -> None:
        """A reader finds either the old file or the new one, and both have the last state."""
        temporary = self._path.with_suffix(".tmp")
        temporary.unlink(missing_ok=True)
        self._write(temporary, line)
        os.replace(temporary, self._path)
        self._sync_directory()
        self._num_bytes = len(line)

    def _write(self, path: Path, line: bytes) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:  # which continues after a short write
            file.write(line)
            file.flush()
            os.fsync(fd)

    def _sync_directory(self) -> None:
        fd = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
