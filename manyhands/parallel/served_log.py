"""A server's log on disk: segments in a directory, written in order, on disk before anybody is told of what is in them.

Each process begins segments of its own, so nothing is ever written behind what a predecessor left torn. Updates are
brought to disk together: when there is no other to be made, or when those that wait are old or many. What a segment
holds is `update_log`'s business. Start reading at `ServedLog.write` and `ServedLog.settle`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from manyhands.checkpoint.reader import scan
from manyhands.errors import CheckpointCorrupt, EnvironmentProblem
from manyhands.parallel.update_log import (
    Begin,
    Broken,
    Bytes,
    Frame,
    Update,
    body,
    check_torn,
    frames,
    is_sound,
    obsolete,
    pack,
    surviving,
    whole,
)

__all__ = ["LogReader", "Past", "ServedLog", "log_of", "saved_step"]

# So long, or for so many bytes, updates wait to be brought to disk together while others are there to be made.
SYNC_S = 0.005
SYNC_BYTES = 4 * 2**20
# What a checkpoint has made needless is found when a segment begins.
SEGMENT_BYTES = 256 * 2**20


class Past(NamedTuple):
    """An update that was made before."""

    step: int
    begin: Begin
    update: Update
    payload: memoryview


class _Segment(NamedTuple):
    path: Path
    data: bytes | mmap.mmap
    begin: Begin
    updates: list[Frame]


def log_of(run_dir: Path, server: int) -> ServedLog:
    return ServedLog(run_dir / "updates" / _name(server), lambda: saved_step(run_dir))


def _name(server: int) -> str:
    return f"server-{server}"


def saved_step(run_dir: Path) -> int | None:
    """Of the checkpoint that was committed last; None where there is none."""
    return next((one.manifest.step for one in scan(run_dir / "checkpoints") if one.manifest is not None), None)


class ServedLog:
    """One process at a time has it."""

    def __init__(self, directory: Path, saved: Callable[[], int | None]) -> None:
        """`saved` tells the step of the newest checkpoint."""
        self._directory, self._saved, self.reader = directory, saved, LogReader(directory)
        self._fd, self._path = -1, directory
        self._end = self._synced = 0
        self._since = 0.0
        self._begun: dict[Path, Begin | None] = {}
        with self._no_error_passes():
            for one in (directory.parent, directory):
                one.mkdir(mode=0o700, exist_ok=True)
            for path in self._paths()[-1:]:  # a predecessor may have been killed before it had this on disk
                _sync(path)
            _sync(directory)

    def reader_of(self, server: int) -> LogReader:
        """Of another server's log, which is beside this one."""
        return LogReader(self._directory.parent / _name(server))

    # ---- writing ----

    def write(self, step: int, update: Update, payload: Sequence[Bytes], begin: Callable[[], Begin]) -> None:
        """Have an update in the log, before it is made; `begin` is for a segment that starts with it."""
        with self._no_error_passes():
            if self.is_settled:
                self._since = time.monotonic()
            if self._fd < 0:
                self._begin_segment(begin())
            self._append(pack(update, step, self._synced, payload))

    def settle(self, *, more: bool) -> bool:
        """Whether all of it is on disk now. While there is `more` to be made, it may wait for that."""
        waiting = self._end - self._synced
        if not waiting:
            return True
        if more and waiting < SYNC_BYTES and time.monotonic() - self._since < SYNC_S:
            return False
        with self._no_error_passes():
            os.fsync(self._fd)
        self._synced = self._end
        if self._end >= SEGMENT_BYTES:
            self.end_segment()
        return True

    @property
    def is_settled(self) -> bool:
        return self._end == self._synced

    def end_segment(self) -> None:
        """The next update begins another."""
        self.settle(more=False)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._end, self._synced = -1, 0, 0

    def _begin_segment(self, begin: Begin) -> None:
        if self._saved() is None:
            raise EnvironmentProblem(
                f"There is no checkpoint beside {self._directory}, but the log of updates continues one.",
                fix=[
                    "a run directory that all hosts with servers have in common",
                    "hands.save() before the first step, in a loop of your own",
                    'durability="upstream"',
                ],
            )
        self.forget_what_is_saved(begin)
        paths = self._paths()
        self._path = self._directory / f"{int(paths[-1].stem) + 1 if paths else 1:08}.log"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self._path, flags, 0o600)
        self._begun[self._path] = begin
        self._append(pack(begin, 0, 0))
        _sync(self._directory)

    def _append(self, parts: Sequence[Bytes]) -> None:
        for part in parts:
            view = memoryview(part)
            while len(view):
                view = view[os.write(self._fd, view) :]
            self._end += len(part)

    @contextlib.contextmanager
    def _no_error_passes(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EnvironmentProblem(
                f"The log of updates in {self._directory} cannot be written: {error.strerror}. "
                "Nothing that workers were told of is lost.",
                fix=["make room, and start the run again with the same command", 'durability="upstream"'],
            ) from error

    # ---- what is needless ----

    def forget_what_is_saved(self, now: Begin) -> None:
        """Remove segments that the newest checkpoint has made needless; `now` is what another would begin with."""
        saved, paths = self._saved(), self._paths()
        if saved is not None:
            for path in paths[: obsolete([*map(self._begin_of, paths), now], saved)]:
                path.unlink()
                self._begun.pop(path, None)

    def _begin_of(self, path: Path) -> Begin | None:
        if path not in self._begun:
            data = _map(path)
            self._begun[path] = _begin(data, frames(data)[0])
        return self._begun[path]

    def clear(self) -> None:
        """The run begins anew, without what is there."""
        self.end_segment()
        for path in self._paths():
            path.unlink()
        self._begun.clear()

    def close(self, now: Begin) -> None:
        """The run ends; if all of it is in the newest checkpoint, nothing is left."""
        self.end_segment()
        self.forget_what_is_saved(now)
        with contextlib.suppress(OSError):  # not empty, or another server's
            self._directory.rmdir()
            self._directory.parent.rmdir()

    def _paths(self) -> list[Path]:
        return _paths(self._directory)


class LogReader:
    """Reads what a server has written, also while it goes on writing."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def past(self, version: int, is_applied: Callable[[int], bool]) -> Iterator[Past]:
        """Updates that count beyond the state after step `version`, in their order, but for those that are applied."""
        segments, counting = self._surviving(version)
        for number, place in counting:
            segment = segments[number]
            frame = segment.updates[place]
            if is_applied(frame.step):
                continue
            if not is_sound(segment.data, frame):
                raise self._corrupt(segment.path, Broken(f"what was on disk at byte {frame.start} has changed"))
            update, payload = body(segment.data, frame, Update)
            yield Past(frame.step, segment.begin, update, payload)

    def reach(self, version: int) -> int:
        """The last step to which, from `version` on, there is every update."""
        segments, counting = self._surviving(version)
        there = {segments[number].updates[place].step for number, place in counting}
        while version + 1 in there:
            version += 1
        return version

    def _surviving(self, version: int) -> tuple[list[_Segment], list[tuple[int, int]]]:
        segments = [segment for path in _paths(self._directory) if (segment := self._read(path)) is not None]
        try:
            steps = [(one.begin, [frame.step for frame in one.updates]) for one in segments]
            return segments, surviving(steps, version)
        except Broken as broken:
            raise self._corrupt(self._directory, broken) from broken

    def _read(self, path: Path) -> _Segment | None:
        """None: whoever began it was killed in that."""
        data = _map(path)
        found, end = frames(data)
        try:
            check_torn(data, end)
            begin = _begin(data, found)
            if begin is None:
                check_torn(data, 0)
                return None
            return _Segment(path, data, begin, whole(data, found)[1:])
        except Broken as broken:
            raise self._corrupt(path, broken) from broken

    def _corrupt(self, path: Path, broken: Broken) -> CheckpointCorrupt:
        root = self._directory.parent
        return CheckpointCorrupt(
            f"The log of updates cannot be read: {broken}.",
            where=str(path),
            fix=[f"to compute again what came after the last checkpoint: mv {root} {root}.broken"],
        )


def _paths(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("*.log") if path.stem.isdigit())


def _begin(data: bytes | mmap.mmap, found: Sequence[Frame]) -> Begin | None:
    if not found or found[0].step or not is_sound(data, found[0]):
        return None
    return body(data, found[0], Begin)[0]


def _map(path: Path) -> bytes | mmap.mmap:
    with (
        contextlib.suppress(FileNotFoundError),
        open(path, "rb") as file,
    ):  # another server may have just removed its own
        if os.fstat(file.fileno()).st_size:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return b""


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
