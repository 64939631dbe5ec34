"""A server's log: segments in a directory, written in order, and safe before any update in them is reported.

Each process begins new segments, so nothing is ever written after what a predecessor left torn. Updates are made safe
in groups: when no other update is due, or when those that wait are old or many. The content of a segment is
defined in `log_format`, what safe means in `log_storage`. Start reading at `WriteAheadLog.write` and
`WriteAheadLog.settle`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from manyhands.checkpoint.reader import scan
from manyhands.errors import CheckpointCorrupt, EnvironmentProblem
from manyhands.parameter_server.log.log_format import (
    Begin,
    Broken,
    Bytes,
    Frame,
    UpdateRecord,
    body,
    check_torn,
    frames,
    is_sound,
    obsolete,
    pack,
    surviving,
    whole,
)
from manyhands.parameter_server.log.log_storage import (
    LOGS,
    Backups,
    DiskStorage,
    LogStorage,
    StorageLost,
    log_directory,
    segment_path,
)
from manyhands.private_files import make_directory

__all__ = ["LogReader", "LoggedUpdate", "WriteAheadLog", "log_of", "saved_step"]

# This long, or for this many bytes, updates wait to be made safe together while others are due.
SYNC_S = 0.005
SYNC_BYTES = 4 * 2**20
LOST = "lost"
# Segments that a checkpoint has made obsolete are found when a segment begins.
SEGMENT_BYTES = 256 * 2**20


class LoggedUpdate(NamedTuple):
    """An update that was made before a restart."""

    step: int
    begin: Begin
    update: UpdateRecord
    payload: memoryview


class _Segment(NamedTuple):
    path: Path
    data: bytes | mmap.mmap
    begin: Begin
    updates: list[Frame]


def log_of(
    home: Path, server: int, backups: Backups | None = None, report: Callable[[str], None] = lambda _: None
) -> WriteAheadLog:
    """A server's log, for the training in directory `home`. With `backups` they store it; else synced files."""
    return WriteAheadLog(log_directory(home / LOGS, server), lambda: saved_step(home), backups, report)


def saved_step(home: Path) -> int | None:
    """The step of the last committed checkpoint; None if there is none."""
    return next((one.manifest.step for one in scan(home / "checkpoints") if one.manifest is not None), None)


class WriteAheadLog:
    """Used by one process at a time."""

    def __init__(
        self,
        directory: Path,
        saved: Callable[[], int | None],
        backups: Backups | None = None,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`saved` returns the step of the newest checkpoint; `report` is called when segments change their storage."""
        self._directory, self._saved, self.reader = directory, saved, LogReader(directory)
        self._backups, self._report = backups, report
        self._storage: LogStorage = DiskStorage(synced=backups is None)
        self._path: Path | None = None
        self._end = self._safe = 0
        self._since = 0.0
        self._begins: dict[Path, Begin | None] = {}
        self._at: str | None = None
        self._moved_after: int | None = None
        """Segments after this step are in another storage, at `_at`, than those before."""
        with self._reporting_errors():
            os.stat(directory.parent.parent)  # a run directory that this host does not see is not created here
            make_directory(directory)
            if backups is None:
                for path in self._paths()[-1:]:  # a predecessor may have been killed before this was on disk
                    _sync(path)
                _sync(directory)

    def before_reading(self) -> None:
        if self._backups is not None:
            self._backups.flush()

    def reader_of(self, server: int) -> LogReader:
        """A reader of another server's log, which is beside this one."""
        return LogReader(log_directory(self._directory.parent, server))

    @property
    def may_end_early(self) -> bool:
        """Its end may be lost with one host, and is computed again; on disk, that would be an error."""
        return self._backups is not None

    # ---- writing ----

    def write(self, step: int, update: UpdateRecord, payload: Sequence[Bytes], begin: Callable[[], Begin]) -> None:
        """Log an update before it is applied; `begin` makes the first frame of a segment that starts with it."""
        with self._reporting_errors():
            if self.is_settled:
                self._since = time.monotonic()
            try:
                if self._path is None:
                    self._begin_segment(begin())
                synced = self._safe if self._backups is None else 0
                self._append(pack(update, step, synced, payload))
            except StorageLost as lost:
                self._lose(lost)

    def settle(self, *, more: bool) -> bool:
        """Whether all of it is safe now. While `more` updates are due, it may wait for them."""
        waiting = self._end - self._safe
        if not waiting:
            return True
        in_time = waiting < SYNC_BYTES and time.monotonic() - self._since < SYNC_S
        if more and in_time and self._storage.takes_time:
            return False
        with self._reporting_errors():
            try:
                self._storage.settle()
            except StorageLost as lost:
                self._lose(lost)
                return True
        self._safe = self._end
        if self._end >= SEGMENT_BYTES:
            self.end_segment()
        return True

    @property
    def is_settled(self) -> bool:
        return self._end == self._safe

    def end_segment(self) -> None:
        """The next update begins another."""
        self.settle(more=False)
        self._leave_segment()

    def _leave_segment(self) -> None:
        self._storage.end()
        self._path, self._end, self._safe = None, 0, 0

    def _begin_segment(self, begin: Begin) -> None:
        if self._saved() is None:
            raise EnvironmentProblem(
                f"There is no checkpoint beside {self._directory}, but the log of updates continues one.",
                fix=[
                    "a run directory that all hosts with servers share",
                    "hands.save() before the first step, in your own loop",
                    'durability="upstream"',
                ],
            )
        self.forget_what_is_saved(begin)
        if self._backups is not None:
            self._choose(self._backups, begin)
        paths = self._paths()
        self._path = segment_path(self._directory, int(paths[-1].stem) + 1 if paths else 1)
        self._storage.begin(self._path)
        self._begins[self._path] = begin
        self._append(pack(replace(begin, unsynced=self.may_end_early), 0, 0))
        if self._backups is None:
            _sync(self._directory)

    def _append(self, parts: Sequence[Bytes]) -> None:
        self._storage.append(parts)
        self._end += sum(len(part) for part in parts)

    @contextlib.contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EnvironmentProblem(
                f"The log of updates in {self._directory} cannot be written: {error.strerror}. "
                "No update that workers know of is lost.",
                fix=["make room, and start the run again with the same command", 'durability="upstream"'],
            ) from error

    # ---- storages ----

    def _choose(self, backups: Backups, begin: Begin) -> None:
        self._storage = backups.choose()
        if backups.at != self._at:
            self._at, self._moved_after = backups.at, max([begin.low, *begin.seen])
            where = f"kept on another host, by the backup at {self._at}" if self._at else "kept on this host alone"
            self._report(f"updates after step {self._moved_after} are {where}")

    def _lose(self, lost: StorageLost) -> None:
        """Continue without the lost backup; the next update begins a segment in another storage."""
        assert self._backups is not None
        self._report(
            f"the backup at {self._backups.at} is lost: {lost}. If this host is lost before the next checkpoint is "
            "committed, the updates since the last one are, too."
        )
        self._backups.give_up()
        self._at = LOST
        self._leave_segment()

    @property
    def wants_checkpoint(self) -> bool:
        """Whether one would make updates safe that are not, or may soon not be."""
        if self._backups is None:
            return False
        if self._moved_after is not None and (self._saved() or 0) >= self._moved_after:
            self._moved_after = None
        is_better_elsewhere = self._path is not None and self._backups.are_better
        return self._at == LOST or self._moved_after is not None or is_better_elsewhere

    # ---- obsolete segments ----

    def forget_what_is_saved(self, now: Begin) -> None:
        """Remove segments that the newest checkpoint has made obsolete; `now` is what another would begin with."""
        saved, paths = self._saved(), self._paths()
        if saved is not None:
            for path in paths[: obsolete([*map(self._begin_of, paths), now], saved)]:
                path.unlink(missing_ok=True)
                self._begins.pop(path, None)

    def _begin_of(self, path: Path) -> Begin | None:
        if path not in self._begins:
            data = _map(path)
            self._begins[path] = _begin(data, frames(data)[0])
        return self._begins[path]

    def clear(self) -> None:
        """The run starts from the beginning, without the existing log."""
        self.end_segment()
        for path in self._paths():
            path.unlink()
        self._begins.clear()
        self._moved_after = None

    def close(self, now: Begin | None) -> None:
        """The run ends; what is in the newest checkpoint is removed. None: there was no interval."""
        self.end_segment()
        if now is not None:
            self.forget_what_is_saved(now)
        if self._backups is not None:
            self._backups.close()
        with contextlib.suppress(OSError):  # not empty, or another server's
            self._directory.rmdir()
            self._directory.parent.rmdir()

    def _paths(self) -> list[Path]:
        return _paths(self._directory)


class LogReader:
    """Reads what a server has written, also while the server is writing."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def past(self, version: int, is_applied: Callable[[int], bool]) -> Iterator[LoggedUpdate]:
        """Updates that count after the state of step `version`, in order, without those that are applied."""
        segments, counting = self._surviving(version)
        for number, index in counting:
            segment = segments[number]
            frame = segment.updates[index]
            if is_applied(frame.step):
                continue
            if not is_sound(segment.data, frame):
                raise self._corrupt(segment.path, Broken(f"what was on disk at byte {frame.start} has changed"))
            update, payload = body(segment.data, frame, UpdateRecord)
            yield LoggedUpdate(frame.step, segment.begin, update, payload)

    def reach(self, version: int) -> int:
        """The last step up to which, from `version` on, every update is in the log."""
        segments, counting = self._surviving(version)
        logged = {segments[number].updates[index].step for number, index in counting}
        while version + 1 in logged:
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
        """None: the process that began it was killed meanwhile."""
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
            fix=[f"to compute the steps since the last checkpoint again: mv {root} {root}.broken"],
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
    ):  # another server may have just removed it
        if os.fstat(file.fileno()).st_size:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return b""


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
