"""The private directory of an agent's sockets, and the removal of directories that were left behind.

The owner of a directory has a lock in it, which the kernel releases when the process ends. The guard removes the
directory of an agent that is gone; if the guard was killed as well, the next launch on that machine does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path

from manyhands.control.processes import orphan_guard
from manyhands.errors import EnvironmentProblem

__all__ = ["lock", "private_directory", "remove_abandoned"]

PREFIX = "mh-"
LOCK = "alive"


def private_directory() -> Path:
    """A fresh 0700 directory with a path short enough for Unix sockets (their limit is 107 bytes)."""
    bases = [f"/run/user/{os.getuid()}", tempfile.gettempdir(), "/tmp"]
    for base in bases:
        if os.path.isdir(base) and os.access(base, os.W_OK) and len(base) <= 70:
            remove_abandoned(base)
            return Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    raise EnvironmentProblem(
        f"No directory for sockets: tried {', '.join(bases)} (writable, path of at most 70 bytes).",
        fix=["TMPDIR=/tmp"],
    )


def lock(directory: Path) -> int:
    """Mark a directory as in use while the returned descriptor is open. Child processes do not inherit it."""
    fd = os.open(directory / f"{LOCK}.new", os.O_RDWR | os.O_CREAT, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: then no other process removes the directory
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(directory / f"{LOCK}.new", directory / LOCK)  # locked before another process can find it
    return fd


def remove_abandoned(base: str) -> None:
    """Remove this user's directories in `base` whose lock no process has, and end the processes of their agents.

    Such an agent was killed together with its guard.
    """
    with contextlib.suppress(OSError), os.scandir(base) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False) and _is_abandoned(entry.path):
                orphan_guard.clean_up(set(), entry.path)


def _is_abandoned(path: str) -> bool:
    try:
        if os.lstat(path).st_uid != os.getuid():
            return False
        fd = os.open(os.path.join(path, LOCK), os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # not ours, or just being created
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
