"""Every change that a checkpoint makes to the file system goes through one small object.

`FileSystem` creates, writes, syncs, renames, removes and locks, and decides nothing. Because there is no other access,
a test can pass a subclass that fails, dies at, or records each call, and so test every possible crash. Reading is in
`reader`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from manyhands.errors import CheckpointSaveFailed
from manyhands.private_files import is_for_group, open_private

__all__ = ["FileSystem", "HashedFile"]

LOCK_TIMEOUT_S = 30.0
PRIVATE = 0o600
_LOCK_POLL_S = 0.01


class FileSystem:
    """The real file system. No call follows a symbolic link or overwrites, except `rename`."""

    def before(self, operation: str, path: Path) -> None:
        """Called before every change; does nothing. A test overrides it to fail or to kill the process."""

    def make_directory(self, path: Path) -> None:
        self.before("mkdir", path)
        os.mkdir(path, 0o700)
        if is_for_group(path.parent):
            os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) | 0o050)

    def create(self, path: Path, mode: int = PRIVATE) -> int:
        self.before("create", path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        if mode == PRIVATE:
            return open_private(path, flags)
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)

    def write(self, fd: int, data: memoryview, path: Path) -> None:
        self.before("write", path)
        while len(data):
            data = data[os.write(fd, data) :]

    def sync(self, fd: int, path: Path) -> None:
        self.before("sync", path)
        os.fsync(fd)

    def sync_directory(self, path: Path) -> None:
        self.before("sync_directory", path)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        self.before("rename", source)
        os.rename(source, target)

    def remove_file(self, path: Path) -> None:
        self.before("unlink", path)
        os.unlink(path)

    def remove_directory(self, path: Path) -> None:
        self.before("rmdir", path)
        os.rmdir(path)

    def remove(self, path: Path) -> None:
        """Remove a file, or a directory of files. Never descends further: checkpoints are flat."""
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            self.remove_file(path)
            return
        for name in sorted(os.listdir(path)):
            self.remove_file(path / name)
        self.remove_directory(path)

    def write_file(self, path: Path, chunks: Iterable[memoryview], mode: int = PRIVATE) -> HashedFile:
        """Create `path`, write and sync; size and SHA-256 are computed meanwhile, so the data is read once."""
        stream = HashedFile(0, hashlib.sha256())
        fd = self.create(path, mode)
        try:
            for chunk in chunks:
                stream.add(chunk)
                self.write(fd, chunk, path)
            self.sync(fd, path)
        finally:
            os.close(fd)
        return stream

    def try_lock(self, path: Path) -> int | None:
        """A descriptor that has the directory's lock until it is closed, or the process ends; None if it is taken."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return None
            raise
        return fd

    @contextlib.contextmanager
    def locked(self, path: Path) -> Iterator[None]:
        """Hold the directory's lock. Commits and removals are short, so a long wait means a stuck file system."""
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while (fd := self.try_lock(path)) is None:
            if time.monotonic() > deadline:
                raise CheckpointSaveFailed(f"{path} has been locked by another writer for {LOCK_TIMEOUT_S:g} s.")
            time.sleep(_LOCK_POLL_S)
        try:
            yield
        finally:
            os.close(fd)

    def forget_cache(self, path: Path) -> None:
        """Make the next read come from the disk, not from the page cache, if the system supports that."""
        if hasattr(os, "posix_fadvise"):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def free_bytes(self, path: Path) -> int:
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize


class HashedFile:
    """Size and digest of the data written so far."""

    def __init__(self, size: int, digest: hashlib._Hash) -> None:
        self.size, self._digest = size, digest

    def add(self, chunk: memoryview) -> None:
        self._digest.update(chunk)
        self.size += len(chunk)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()
