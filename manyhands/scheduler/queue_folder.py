"""The queue's directory: submissions and cancellations are files in it, so they need no daemon to be taken.

    queue.log          what happened and was decided (queue_log.py)
    daemon.lock        locked by the one daemon of this queue
    jobs/7/            made by `mh submit`, which takes the next free number
        submission.json    the whole request; the job exists from when this file does
        cancel             it is to be cancelled
        alive              locked by its `mh run` for as long as that lives
        output.txt         what its run printed
        run/               its run directory

All of it is private to its owner: a submission holds the environment of the shell that it came from. Start reading at
`QueueFolder`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
from pathlib import Path

import msgspec

from manyhands.control.line_log import sync_directory
from manyhands.errors import EnvironmentProblem, RunDirectoryInUse, UsageError
from manyhands.private_files import make_directory, owner_and_mode
from manyhands.scheduler.queue_log import QueueLog

__all__ = ["JobSubmission", "QueueFolder", "is_locked", "script_digest"]

MAX_JOBS = 1_000_000


class JobSubmission(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    script: str
    arguments: list[str] = []
    settings: list[str] = []
    """Flags of `mh run`."""
    least: int = 1
    most: int = 1
    priority: float = 1.0
    after: list[str] = []
    grace_s: float = 30.0
    digest: str
    """Of the script, as it was submitted."""
    folder: str
    """Where it is run."""
    python: str
    environment: dict[str, str] = {}
    submitted_s: float


def script_digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class QueueFolder:
    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.jobs = self.path / "jobs"
        self.log = QueueLog(self.path / "queue.log")

    def make(self) -> None:
        """Create it, and refuse one that others could change or read."""
        try:
            make_directory(self.path)
            found = self.path.stat()
            if found.st_uid != os.geteuid() or found.st_mode & 0o077:
                owner, mode = owner_and_mode(self.path)
                raise EnvironmentProblem(
                    f"The queue {self.path} belongs to {owner} and has mode {mode}, but must be private.",
                    fix=[f"chmod 700 {self.path}", "--dir, with another directory"],
                )
            make_directory(self.jobs)
        except OSError as error:
            what = f"The queue {self.path} cannot be used: {error.strerror}."
            raise EnvironmentProblem(what, fix=["--dir, with a directory that you may write to"]) from error

    # ---- submitting ----

    def submit(self, submission: JobSubmission) -> str:
        """The number of the new job, which is on disk when this returns."""
        job = self._next_job()
        self._write(self.jobs / job / "submission.json", msgspec.json.encode(submission))
        sync_directory(self.jobs)
        return job

    def _next_job(self) -> str:
        first = max(map(int, self._numbers()), default=0) + 1
        for number in range(first, first + MAX_JOBS):
            with contextlib.suppress(FileExistsError):
                (self.jobs / str(number)).mkdir(mode=0o700)
                return str(number)
        raise EnvironmentProblem(f"{self.jobs} has no free number.")

    def cancel(self, job: str) -> None:
        self._write(self.jobs / job / "cancel", b"")

    def _write(self, path: Path, content: bytes) -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(fd)
        os.replace(temporary, path)
        sync_directory(path.parent)

    # ---- reading ----

    def _numbers(self) -> list[str]:
        return [name for name in os.listdir(self.jobs) if name.isdigit()] if self.jobs.is_dir() else []

    def submitted(self) -> list[str]:
        """All jobs, in the order of submission."""
        return sorted((name for name in self._numbers() if (self.jobs / name / "submission.json").exists()), key=int)

    def submission(self, job: str) -> JobSubmission:
        path = self.jobs / job / "submission.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=JobSubmission)
        except FileNotFoundError:
            known = self.submitted()
            fix = [f"one of {', '.join(known[-10:])}"] if known else ["mh submit train.py"]
            raise UsageError(f"There is no job {job} in {self.path}.", fix=fix) from None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise EnvironmentProblem(
                f"The submission of job {job} cannot be read: {error}.", where=str(path)
            ) from error

    def is_cancelled(self, job: str) -> bool:
        return (self.jobs / job / "cancel").exists()

    def run_dir(self, job: str) -> Path:
        return self.jobs / job / "run"

    def output(self, job: str) -> Path:
        return self.jobs / job / "output.txt"

    # ---- the daemon's lock ----

    def lock(self) -> int:
        """Held while the returned descriptor is open. `RunDirectoryInUse` if another daemon has it."""
        fd = os.open(self.path / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 4096, 0).decode(errors="replace")
            os.close(fd)
            raise RunDirectoryInUse(
                f"The queue {self.path} has a daemon already: {holder or 'its pid is not known'}.",
                fix=["mh submit, which that one serves", "--dir, with another directory"],
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        return fd

    def has_daemon(self) -> bool:
        return is_locked(self.path / "daemon.lock")


def is_locked(path: Path) -> bool:
    """Whether a process has an exclusive lock on this file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
