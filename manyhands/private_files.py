"""Files for their owner's eyes alone, whatever the umask, the mode that they had before, or the directory they are in.

A run's logs and records hold what a script prints and trains on. Symbolic links are never followed when writing: who
may write into a directory must not choose which of our files is overwritten.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["open_private", "write_private"]


def open_private(path: Path | str, flags: int) -> int:
    """A descriptor of a file with mode 0600. `OSError` (ELOOP) for a symbolic link."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    found = os.fstat(fd)
    if found.st_mode & 0o077 and found.st_uid == os.geteuid():
        os.fchmod(fd, 0o600)
    return fd


def write_private(path: Path, data: bytes) -> None:
    """Replace the content of a file."""
    with os.fdopen(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(data)
