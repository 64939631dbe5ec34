"""Every state a disk may be in after power is lost, computed from a log of what was asked of it.

What was synced is there. What was not may be there or not, change by change: a directory entry whose directory was
not synced after it, and the bytes of a file after its last sync (lost, torn at 512 or 4096 bytes, zeros, or all there).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from manyhands.checkpoint.file_ops import FileSystem

TEARS = ("lost", "torn at 512", "torn at 4096", "zeros", "whole")


class Change(NamedTuple):
    operation: str
    path: Path
    extra: Any = None


class Recorder(FileSystem):
    """Does everything, and writes down what was done."""

    def __init__(self) -> None:
        self.log: list[Change] = []

    def make_directory(self, path: Path) -> None:
        super().make_directory(path)
        self.log.append(Change("mkdir", path))

    def create(self, path: Path, mode: int = 0o600) -> int:
        fd = super().create(path, mode)
        self.log.append(Change("create", path))
        return fd

    def write(self, fd: int, data: memoryview, path: Path) -> None:
        super().write(fd, data, path)
        self.log.append(Change("write", path, bytes(data)))

    def sync(self, fd: int, path: Path) -> None:
        super().sync(fd, path)
        self.log.append(Change("sync", path))

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self.log.append(Change("sync_directory", path))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.log.append(Change("rename", source, target))

    def remove_file(self, path: Path) -> None:
        super().remove_file(path)
        self.log.append(Change("unlink", path))

    def remove_directory(self, path: Path) -> None:
        super().remove_directory(path)
        self.log.append(Change("rmdir", path))


Tree = dict[str, Any]
"""Name -> bytes of a file, or the Tree of a directory."""


def states(log: list[Change], root: Path) -> Iterator[Tree]:
    """Every legal content of `root` if the power goes after the last change of `log`."""
    open_question = [
        index
        for index, change in enumerate(log)
        if change.operation in ("mkdir", "create", "rename", "unlink", "rmdir")
        and not any(later == Change("sync_directory", change.path.parent) for later in log[index:])
    ]
    for kept in itertools.product((False, True), repeat=len(open_question)):
        dropped = {index for index, keep in zip(open_question, kept, strict=True) if not keep}
        for tear in TEARS:
            yield _replay(log, root, dropped, tear)


def _replay(log: list[Change], root: Path, dropped: set[int], tear: str) -> Tree:
    top: Tree = {}
    contents = _contents(log, tear)
    created = iter(contents)
    for index, change in enumerate(log):
        content = next(created) if change.operation == "create" else b""
        if index in dropped or change.path == root or change.operation in ("write", "sync", "sync_directory"):
            continue
        parent = _directory(top, root, change.path.parent)
        if parent is None:
            continue
        if change.operation == "mkdir":
            parent[change.path.name] = {}
        elif change.operation == "create":
            parent[change.path.name] = content
        elif change.operation in ("unlink", "rmdir"):
            parent.pop(change.path.name, None)
        elif change.path.name in parent:
            parent[change.extra.name] = parent.pop(change.path.name)
    return top


def _directory(top: Tree, root: Path, path: Path) -> Tree | None:
    found: Any = top
    for part in path.relative_to(root).parts:
        found = found.get(part)
        if not isinstance(found, dict):
            return None
    return found


def _contents(log: list[Change], tear: str) -> list[bytes]:
    """What each created file holds, in the order of creation; paths are never used twice before a rename."""
    synced: dict[int, int] = {}
    data: list[bytes] = []
    current: dict[Path, int] = {}
    for change in log:
        if change.operation == "create":
            current[change.path] = len(data)
            data.append(b"")
        elif change.operation == "write":
            data[current[change.path]] += change.extra
        elif change.operation == "sync":
            synced[current[change.path]] = len(data[current[change.path]])
    return [_torn(content, synced.get(number, 0), tear) for number, content in enumerate(data)]


def _torn(content: bytes, safe: int, tear: str) -> bytes:
    end = len(content)
    if tear == "zeros":
        return content[:safe] + bytes(end - safe)
    cut = {"lost": safe, "whole": end, "torn at 512": end // 512 * 512, "torn at 4096": end // 4096 * 4096}[tear]
    return content[: max(safe, cut)]


def build(tree: Tree, path: Path) -> None:
    path.mkdir(parents=True)
    for name, content in tree.items():
        if isinstance(content, dict):
            build(content, path / name)
        else:
            (path / name).write_bytes(content)


def key(tree: Tree) -> Any:
    """Equal for equal trees with any random names of temp directories: they are all alike to a loader."""
    return tuple(
        sorted((name, key(content) if isinstance(content, dict) else content) for name, content in tree.items())
    )
