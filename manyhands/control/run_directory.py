"""The run directory: its paths, its lock, and `run.json`, the record of the run's status.

One process owns it at a time: the agent of the launching host, or a lone worker. The lock is an flock, so it is
released the moment its holder is gone, however it ended. Directories have mode 0700 and files 0600; in a run that its
group may read, 0750 and 0640, which the mode of `run.json` shows (see `private_files`). The lock stays private.
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
    """Where the agent answers `mh status`, `mh stop` and `mh scale` while the run is live."""


def run_name(target: str) -> str:
    """<time>-<script, or last part of the module>, with only characters that are safe in paths and terminals."""
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
    """Use `adopt` to own a directory, `visit` to write logs into a directory that another host owns."""

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
        """The last generation of the previous launch in this directory."""
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
        """Lock the directory, creating it if needed; an unfinished run in it can be resumed.

        Raises `UsageError` for a name that is not valid text, `RunDirectoryInUse` naming the process that has the
        lock, `RunFinished` unless `overwrite`, `EnvironmentProblem` when the file system refuses. With
        `group_readable`, files of earlier launches become readable for the group; without it, private again.
        """
        run_dir = Path(path).absolute()
        check_name(str(run_dir), "The run directory")
        try:
            _make(run_dir, group_readable)
            lock_fd = _lock(run_dir)
        except OSError as error:
            what = f"The run directory {run_dir} cannot be used: {error.strerror}."
            raise EnvironmentProblem(what, fix=["--run-dir, or run_dir=, with a directory you may write to"]) from error
        try:
            before = read_run(run_dir) if (run_dir / "run.json").exists() else None
            if before is not None and before.status == "finished":
                _make_room(run_dir, overwrite)
        except BaseException:
            os.close(lock_fd)
            raise
        record = RunRecord(
            run=run or run_dir.name,
            command=[readable(word) for word in command or []],
            created=_now(),
            host=socket.gethostname(),
            pid=os.getpid(),
            endpoint=endpoint,
        )
        directory = cls(run_dir, record, lock_fd, before.generation if before else None, group_readable)
        record.generation = directory.last_generation
        was_for_group = is_for_group(run_dir)
        directory._write()
        if before is not None and was_for_group != group_readable:
            _let_group_read(run_dir, group_readable)
        return directory

    @classmethod
    def visit(cls, path: str | Path, run: str) -> RunDirectory:
        run_dir = Path(path)
        _make(run_dir, False)
        return cls(run_dir, RunRecord(run=run), None, None)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def events(self) -> Path:
        return self.path / "events"

    def logs(self, attempt: int) -> Path:
        return self.path / "logs" / f"attempt-{attempt}"

    def last_attempt(self) -> int:
        """The highest attempt that has logs here; a resumed run continues counting from it."""
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
        """Replace run.json atomically. Errors are ignored: a full disk must not end a healthy run."""
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


def _make(run_dir: Path, group_readable: bool) -> None:
    """Create the directory. Parents that this creates get the group's bits too, or the group could not get through."""
    missing = [one for one in (run_dir, *run_dir.parents) if not one.exists()]
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if group_readable:
        for one in {run_dir, *missing}:
            os.chmod(one, stat.S_IMODE(one.stat().st_mode) | 0o050)


def _let_group_read(run_dir: Path, group_readable: bool) -> None:
    """Change the mode of files that manyhands wrote in earlier launches; not the user's own files, nor link targets."""
    for name in OWNED:
        _change_mode(run_dir / name, group_readable)
        for folder, folders, files in os.walk(run_dir / name):
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


def _lock(run_dir: Path) -> int:
    fd = os.open(run_dir / "run.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 4096, 0)
        os.close(fd)
        raise RunDirectoryInUse(
            f"{run_dir} belongs to a live run: {_holder(holder)}.", fix=["another --run-dir", f"mh stop {run_dir}"]
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


def _make_room(run_dir: Path, overwrite: bool) -> None:
    if not overwrite:
        raise RunFinished(
            f"{run_dir} holds a finished run.",
            fix=["another --run-dir", "--overwrite (or MANYHANDS_OVERWRITE=1), to lose the finished one"],
        )
    for name in OWNED:
        found = run_dir / name
        shutil.rmtree(found) if found.is_dir() and not found.is_symlink() else found.unlink(missing_ok=True)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
