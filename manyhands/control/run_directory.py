"""The run directory: its paths, its lock, and `run.json`, the record of what became of the run.

One process owns it at a time: the agent of the launching host, or a lone worker. The lock is an flock, so it is free
the moment its holder is gone, however it went. Directories are 0700, files 0600; in a run for its group 0750 and 0640,
which is what the mode of `run.json` says (see `private_files`). The lock stays its owner's alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import stat
import time
from pathlib import Path
from typing import Literal

import msgspec

from manyhands.errors import EnvironmentProblem, RunDirectoryInUse, RunFinished, UsageError
from manyhands.private_files import GROUP_FILE, is_for_group
from manyhands.spec.undecodable_names import check_name, readable

__all__ = ["RunDirectory", "RunRecord", "default_path", "read_run", "run_name"]

Status = Literal["running", "finished", "failed", "stopped"]

# What manyhands itself writes into a run directory, and therefore all that `overwrite` may remove.
OWNED = ("run.json", "calls", "checkpoints", "events", "logs", "summaries", "trainings", "updates")


class RunRecord(msgspec.Struct, kw_only=True):
    run: str
    command: list[str] = []
    status: Status = "running"
    exit_code: int | None = None
    created: str = ""
    ended: str | None = None
    host: str = ""
    pid: int = 0
    generation: str | None = None
    endpoint: str | None = None
    """Where the agent answers `mh status` and `mh stop`, while the run is live."""


def run_name(target: str) -> str:
    """<time>-<script>, or the last part of a module, with nothing in it that a path or a terminal could trip over."""
    name = Path(target.split(":")[0]).name
    stem = name.removesuffix(".py") if name.endswith(".py") else name.rpartition(".")[2]
    safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in stem).lstrip(".-")[:40] or "run"
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{safe}"


def default_path(name: str, parent: Path = Path("runs")) -> Path:
    path, number = parent / name, 2
    while path.exists():
        path, number = parent / f"{name}-{number}", number + 1
    return path


def read_run(path: str | Path) -> RunRecord:
    where = Path(path) / "run.json"
    try:
        return msgspec.json.decode(where.read_bytes(), type=RunRecord)
    except FileNotFoundError as error:
        raise UsageError(f"{path} is not a run directory: it has no run.json.") from error
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"The record of this run cannot be read: {error}.", where=str(where)) from error


class RunDirectory:
    """Use `adopt` to own a directory, `visit` to write logs into one that another host owns."""

    def __init__(
        self,
        path: Path,
        record: RunRecord,
        lock_fd: int | None,
        last_generation: str | None,
        group_readable: bool = False,
    ) -> None:
        self.path, self.record = path, record
        self._mode = GROUP_FILE if group_readable else 0o600
        self.last_generation = last_generation
        """Of the launch before this one in the same directory."""
        self._lock_fd = lock_fd

    @classmethod
    def adopt(
        cls,
        path: str | Path,
        overwrite: bool,
        *,
        group_readable: bool = False,
        run: str | None = None,
        command: list[str] | None = None,
        endpoint: str | None = None,
    ) -> RunDirectory:
        """Lock the directory, making it if needed; an unfinished run in it is there to be resumed.

        Raises `UsageError` for a name that is no text, `RunDirectoryInUse` naming the holder, `RunFinished` unless
        `overwrite`, `EnvironmentProblem` when the file system refuses. With `group_readable` what an earlier
        start wrote becomes readable for the group, and without it private again.
        """
        place = Path(path).absolute()
        check_name(str(place), "The run directory")
        try:
            _make(place, group_readable)
            lock_fd = _lock(place)
        except OSError as error:
            what = f"The run directory {place} cannot be used: {error.strerror}."
            raise EnvironmentProblem(what, fix=["--run-dir, or run_dir=, with a directory you may write to"]) from error
        try:
            before = read_run(place) if (place / "run.json").exists() else None
            if before is not None and before.status == "finished":
                _make_room(place, overwrite)
        except BaseException:
            os.close(lock_fd)
            raise
        record = RunRecord(
            run=run or place.name,
            command=[readable(word) for word in command or []],
            created=_now(),
            host=socket.gethostname(),
            pid=os.getpid(),
            endpoint=endpoint,
        )
        directory = cls(place, record, lock_fd, before.generation if before else None, group_readable)
        record.generation = directory.last_generation
        was_for_group = is_for_group(place)
        directory._write()
        if before is not None and was_for_group != group_readable:
            _let_group_read(place, group_readable)
        return directory

    @classmethod
    def visit(cls, path: str | Path, run: str) -> RunDirectory:
        place = Path(path)
        _make(place, False)
        return cls(place, RunRecord(run=run), None, None)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def events(self) -> Path:
        return self.path / "events"

    def logs(self, attempt: int) -> Path:
        return self.path / "logs" / f"attempt-{attempt}"

    def last_attempt(self) -> int:
        """The highest attempt that has logs here; a resumed run counts on from it."""
        numbers = [path.name.removeprefix("attempt-") for path in (self.path / "logs").glob("attempt-*")]
        return max((int(number) for number in numbers if number.isdigit()), default=0)

    def mark(self, status: Status, exit_code: int | None = None) -> None:
        self.record.status, self.record.exit_code = status, exit_code
        if status != "running":
            self.record.ended, self.record.endpoint = _now(), None
        self._write()

    def note_generation(self, generation: str) -> None:
        self.record.generation = generation
        self._write()

    def release(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _write(self) -> None:
        """Replace run.json whole. A full disk must not end a run that is otherwise well, so errors are dropped."""
        if self._lock_fd is None:
            return
        temporary = self.path / f".run.json.{os.getpid()}"
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(fd, "wb") as file:
                os.fchmod(fd, self._mode)
                file.write(msgspec.json.format(msgspec.json.encode(self.record)) + b"\n")
            os.replace(temporary, self.path / "run.json")
        except OSError:
            temporary.unlink(missing_ok=True)


def _make(place: Path, group_readable: bool) -> None:
    """Those above it that are missing, too: a group that may not pass through them can read nothing below."""
    missing = [one for one in (place, *place.parents) if not one.exists()]
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if group_readable:
        for one in {place, *missing}:
            os.chmod(one, stat.S_IMODE(one.stat().st_mode) | 0o050)


def _let_group_read(place: Path, group_readable: bool) -> None:
    """What an earlier start wrote, too. Of the user's own files in there none is touched, nor what a link leads to."""
    for name in OWNED:
        _change_mode(place / name, group_readable)
        for folder, folders, files in os.walk(place / name):
            for each in (*folders, *files):
                _change_mode(Path(folder) / each, group_readable)


def _change_mode(path: Path, group_readable: bool) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            bits = 0o050 if stat.S_ISDIR(found.st_mode) else 0o040
            if found.st_uid == os.geteuid():
                os.fchmod(fd, stat.S_IMODE(found.st_mode) & ~0o077 | (bits if group_readable else 0))
        finally:
            os.close(fd)


def _lock(place: Path) -> int:
    fd = os.open(place / "run.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 4096, 0)
        os.close(fd)
        raise RunDirectoryInUse(
            f"{place} belongs to a live run: {_holder(holder)}.", fix=["another --run-dir", f"mh stop {place}"]
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": _now()}).encode(), 0)
    return fd


def _holder(content: bytes) -> str:
    try:
        known = json.loads(content)
        return f"pid {int(known['pid'])} on {known['host']}, started {known['started']}"
    except (ValueError, KeyError, TypeError):
        return "its pid is not known"


def _make_room(place: Path, overwrite: bool) -> None:
    if not overwrite:
        raise RunFinished(
            f"{place} holds a finished run.",
            fix=["another --run-dir", "--overwrite (or MANYHANDS_OVERWRITE=1), to lose the finished one"],
        )
    for name in OWNED:
        found = place / name
        shutil.rmtree(found) if found.is_dir() and not found.is_symlink() else found.unlink(missing_ok=True)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
