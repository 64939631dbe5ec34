"""Files that only their owner, or their group, can read, for any umask, previous mode or directory.

A run's logs and records contain what a script prints and trains on: files are 0600 and directories 0700. In a
`group_readable` run they are 0640 and 0750. The mode of its `run.json` says which of the two applies, so that every
process of the run, on any host with the same file system, knows it without a setting. The mode of a directory does not:
one that existed before has the mode that a umask gave it.

Symbolic links are never followed when writing: a user with write access to a directory must not be able to choose which
of our files is overwritten.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

__all__ = [
    "GROUP_FILE",
    "in_a_run",
    "is_for_group",
    "make_directory",
    "open_private",
    "owner_and_mode",
    "write_private",
]

RECORD = "run.json"
LOCK = "run.lock"
GROUP_FILE = 0o640
_DEPTH = 8  # depth of directories below a run directory; trainings/2/updates/server-0 has four


def open_private(path: Path | str, flags: int) -> int:
    """Open a file with mode 0600, or 0640 in a group-readable run. `OSError` (ELOOP) for a symbolic link."""
    mode = GROUP_FILE if is_for_group(Path(path).parent) else 0o600
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    found = os.fstat(fd)
    if (found.st_mode ^ mode) & 0o077 and found.st_uid == os.geteuid():
        os.fchmod(fd, mode)
    return fd


def write_private(path: Path, data: bytes) -> None:
    """Replace the content of a file."""
    with os.fdopen(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(data)


def make_directory(path: Path) -> None:
    """Make a directory and missing parents; 0700, or 0750 in a group-readable run. An existing one is unchanged."""
    if path.is_dir():
        return
    if path.parent != path:
        make_directory(path.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
        if is_for_group(path):
            os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) | 0o050)


def is_for_group(directory: Path) -> bool:
    """Whether the run that this directory belongs to, if any, is group-readable."""
    found = _record_above(directory)
    return found is not None and stat.S_IMODE(found.st_mode) == GROUP_FILE


def in_a_run(directory: Path) -> bool:
    return _record_above(directory) is not None


def owner_and_mode(path: Path) -> tuple[str, str]:
    """For display: "ada" (or "user 1234"), and "0640"."""
    import pwd  # missing on some systems, and this module is imported before `check_system` reports that

    found = os.stat(path)
    try:
        owner = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        owner = f"user {found.st_uid}"
    return owner, f"{stat.S_IMODE(found.st_mode):04o}"


def _record_above(directory: Path) -> os.stat_result | None:
    """Status of the closest `run.json` of this user above; without a lock next to it, it is another program's file."""
    start = directory.absolute()
    for above in (start, *start.parents)[:_DEPTH]:
        with contextlib.suppress(OSError):
            found = os.lstat(above / RECORD)
            os.lstat(above / LOCK)
            return found if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() else None
    return None
