"""A server's log: segments in a directory, written in order, and safe before anybody is told of what is in them.

Each process begins segments of its own, so nothing is ever written behind what a predecessor left torn. Updates are
made safe together: when there is no other to be made, or when those that wait are old or many. What a segment holds is
`log_format`'s business, what safe means `log_storage`'. Start reading at `ServedLog.write` and `ServedLog.settle`.
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
from manyhands.parameter_server.log.log_storage import (
    LOGS,
    Backups,
    OnDisk,
    Place,
    PlaceLost,
    log_directory,
    segment_path,
)
from manyhands.private_files import make_directory

__all__ = ["LogReader", "Past", "ServedLog", "log_of", "saved_step"]

# So long, or for so many bytes, updates wait to be made safe together while others are there to be made.
SYNC_S = 0.005
SYNC_BYTES = 4 * 2**20
LOST = "lost"
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


def log_of(
    home: Path, server: int, backups: Backups | None = None, tell: Callable[[str], None] = lambda _: None
) -> ServedLog:
    """Of a server of the training with this `home`. With `backups` it is where they have it; else on disk, synced."""
    return ServedLog(log_directory(home / LOGS, server), lambda: saved_step(home), backups, tell)


def saved_step(home: Path) -> int | None:
    """Of the checkpoint that was committed last; None where there is none."""
    return next((one.manifest.step for one in scan(home / "checkpoints") if one.manifest is not None), None)


class ServedLog:
    """One process at a time has it."""

    def __init__(
        self,
        directory: Path,
        saved: Callable[[], int | None],
        backups: Backups | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`saved` tells the step of the newest checkpoint; `tell` is told when segments go to another place."""
        self._directory, self._saved, self.reader = directory, saved, LogReader(directory)
        self._backups, self._tell = backups, tell
        self._place: Place = OnDisk(synced=backups is None)
        self._path: Path | None = None
        self._end = self._safe = 0
        self._since = 0.0
        self._begun: dict[Path, Begin | None] = {}
        self._at: str | None = None
        self._moved: int | None = None
        """Segments after this step are in another place, at `_at`, than those before."""
        with self._no_error_passes():
            os.stat(directory.parent.parent)  # a run directory that this host does not see is not made here
            make_directory(directory)
            if backups is None:
                for path in self._paths()[-1:]:  # a predecessor may have been killed before it had this on disk
                    _sync(path)
                _sync(directory)

    def before_reading(self) -> None:
        if self._backups is not None:
            self._backups.flush()

    def reader_of(self, server: int) -> LogReader:
        """Of another server's log, which is beside this one."""
        return LogReader(log_directory(self._directory.parent, server))

    @property
    def may_end_early(self) -> bool:
        """Some of it may be lost with one host, and is computed again; on disk, that would be an error."""
        return self._backups is not None

    # ---- writing ----

    def write(self, step: int, update: Update, payload: Sequence[Bytes], begin: Callable[[], Begin]) -> None:
        """Have an update in the log, before it is made; `begin` is for a segment that starts with it."""
        with self._no_error_passes():
            if self.is_settled:
                self._since = time.monotonic()
            try:
                if self._path is None:
                    self._begin_segment(begin())
                synced = self._safe if self._backups is None else 0
                self._append(pack(update, step, synced, payload))
            except PlaceLost as lost:
                self._lose(lost)

    def settle(self, *, more: bool) -> bool:
        """Whether all of it is safe now. While there is `more` to be made, it may wait for that."""
        waiting = self._end - self._safe
        if not waiting:
            return True
        in_time = waiting < SYNC_BYTES and time.monotonic() - self._since < SYNC_S
        if more and in_time and self._place.takes_time:
            return False
        with self._no_error_passes():
            try:
                self._place.settle()
            except PlaceLost as lost:
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
        self._place.end()
        self._path, self._end, self._safe = None, 0, 0

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
        if self._backups is not None:
            self._choose(self._backups, begin)
        paths = self._paths()
        self._path = segment_path(self._directory, int(paths[-1].stem) + 1 if paths else 1)
        self._place.begin(self._path)
        self._begun[self._path] = begin
        self._append(pack(replace(begin, unsynced=self.may_end_early), 0, 0))
        if self._backups is None:
            _sync(self._directory)

    def _append(self, parts: Sequence[Bytes]) -> None:
        self._place.append(parts)
        self._end += sum(len(part) for part in parts)

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

    # ---- places ----

    def _choose(self, backups: Backups, begin: Begin) -> None:
        self._place = backups.choose()
        if backups.at != self._at:
            self._at, self._moved = backups.at, max([begin.low, *begin.seen])
            where = f"kept on another host, by the backup at {self._at}" if self._at else "kept on this host alone"
            self._tell(f"updates after step {self._moved} are {where}")

    def _lose(self, lost: PlaceLost) -> None:
        """Go on without what the backup had; the next update begins a segment in another place."""
        assert self._backups is not None
        self._tell(
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
        if self._moved is not None and (self._saved() or 0) >= self._moved:
            self._moved = None
        is_better_elsewhere = self._path is not None and self._backups.are_better
        return self._at == LOST or self._moved is not None or is_better_elsewhere

    # ---- what is needless ----

    def forget_what_is_saved(self, now: Begin) -> None:
        """Remove segments that the newest checkpoint has made needless; `now` is what another would begin with."""
        saved, paths = self._saved(), self._paths()
        if saved is not None:
            for path in paths[: obsolete([*map(self._begin_of, paths), now], saved)]:
                path.unlink(missing_ok=True)
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
        self._moved = None

    def close(self, now: Begin | None) -> None:
        """The run ends; if all of it is in the newest checkpoint, nothing is left. None: there was no course."""
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
