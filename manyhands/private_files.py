"""Files for their owner's eyes, or their group's, whatever the umask, the mode that they had before, or where they are.

A run's logs and records hold what a script prints and trains on: files are 0600 and directories 0700. A run that is to
be `group_readable` has 0640 and 0750 instead. Which of the two is said by the mode of its `run.json`, so that every
process of the run, on any host that shares its file system, knows without being sent a setting. The mode of a directory
says nothing: one that was there before has the mode that a umask gave it.

Symbolic links are never followed when writing: who may write into a directory must not choose which of our files is
overwritten.
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
_DEPTH = 8  # of directories below a run directory; trainings/2/updates/server-0 has four


def open_private(path: Path | str, flags: int) -> int:
    """A descriptor of a file with mode 0600, or 0640 in a run for its group. `OSError` (ELOOP) for a symbolic link."""
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
    """With those above it that are missing; 0700, or 0750 in a run for its group. One that is there stays as it is."""
    if path.is_dir():
        return
    if path.parent != path:
        make_directory(path.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
        if is_for_group(path):
            os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) | 0o050)


def is_for_group(directory: Path) -> bool:
    """Whether the run that this directory is of, if any, may be read by its group."""
    found = _record_above(directory)
    return found is not None and stat.S_IMODE(found.st_mode) == GROUP_FILE


def in_a_run(directory: Path) -> bool:
    return _record_above(directory) is not None


def owner_and_mode(path: Path) -> tuple[str, str]:
    """For people: "ada" (or "user 1234"), and "0640"."""
    import pwd  # which not every system has, and this module is imported before that is said

    found = os.stat(path)
    try:
        owner = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        owner = f"user {found.st_uid}"
    return owner, f"{stat.S_IMODE(found.st_mode):04o}"


def _record_above(directory: Path) -> os.stat_result | None:
    """Of the nearest `run.json` of this user's with a lock beside it: some other program's is no run's."""
    place = directory.absolute()
    for above in (place, *place.parents)[:_DEPTH]:
        with contextlib.suppress(OSError):
            found = os.lstat(above / RECORD)
            os.lstat(above / LOCK)
            return found if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() else None
    return None
