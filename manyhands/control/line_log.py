"""A log of lines with checksums: what was appended is on disk, and an incomplete line is recognised as such."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path

__all__ = ["LINE_BYTES", "LineLog", "sync_directory"]

LINE_BYTES = 10
"""That a line has beside its body."""


class LineLog:
    """Lines of bytes without newlines. What an object writes first begins a new file, so nothing is ever written after
    an incomplete line of a predecessor."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.num_bytes: int | None = None
        """Of the file that this object began; None: it has written none."""

    def read(self) -> list[bytes | None]:
        """All lines; None for one that is incomplete or damaged."""
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        return [_body(line) for line in lines]

    def append(self, body: bytes) -> None:
        assert self.num_bytes is not None, "begin_file comes first"
        line = _line(body)
        self._write(self._path, line)
        self.num_bytes += len(line)

    def begin_file(self, bodies: Sequence[bytes]) -> None:
        """Replace the file by one with these lines. A reader finds either the old file or the new one."""
        content = b"".join(map(_line, bodies))
        temporary = self._path.with_suffix(".tmp")
        temporary.unlink(missing_ok=True)
        self._write(temporary, content)
        os.replace(temporary, self._path)
        sync_directory(self._path.parent)
        self.num_bytes = len(content)

    def _write(self, path: Path, content: bytes) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:  # which continues after a short write
            file.write(content)
            file.flush()
            os.fsync(fd)


def sync_directory(path: Path) -> None:
    """Names of files in it are on disk when this returns."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _line(body: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _body(line: bytes) -> bytes | None:
    checksum, _, body = line.partition(b" ")
    return body if checksum == b"%08x" % zlib.crc32(body) else None
