"""The runs of a queue's jobs on this machine: started, scaled, asked to stop, killed, and observed.

A run is an ordinary `mh run` in a separate session, which outlives the daemon. Its `alive` file is locked through a
descriptor that only it has: so whether a job runs is a fact that no crash of the daemon can blur, and a job that runs
is never started again. How it ended is in its run directory. Start reading at `LocalRuns.start`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from manyhands.control.run_directory import RunRecord, read_run
from manyhands.control.session.run_client import request_scale, request_stop
from manyhands.errors import ManyhandsError, UsageError
from manyhands.scheduler.queue_folder import JobSubmission, QueueFolder, is_locked, script_digest
from manyhands.scheduler.run_progress import ProgressReport, RunProgress

__all__ = ["LocalRuns", "RunRefused", "run_command"]


NO_ACCELERATORS = {"CUDA_VISIBLE_DEVICES": ""}
"""They are not shared out among jobs, and two jobs on one device would not know of each other."""


class RunRefused(ManyhandsError):
    """The job cannot be started as it was submitted; the message says why."""


class LocalRuns:
    def __init__(self, folder: QueueFolder, threads: int) -> None:
        self._folder, self._threads = folder, threads
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._progress: dict[str, RunProgress] = {}

    def start(self, job: str, placed: Sequence[int]) -> bool:
        """Start it, or resume it; False if its run is alive, or has finished, already. `RunRefused` says why not."""
        record = self._record(job)
        if self.is_alive(job) or (record is not None and record.status == "finished"):
            return False
        submission = self._folder.submission(job)
        _check_script(submission)
        with contextlib.ExitStack() as opened:
            fd, output = (_open(path) for path in (self._alive_path(job), self._folder.output(job)))
            opened.callback(os.close, fd)
            opened.callback(os.close, output)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.utime(fd)  # a record of the run that is older is that of an earlier start
            command = run_command(submission, self._folder.run_dir(job), sum(placed), self._threads)
            self._processes[job] = self._spawn(command, submission, output, fd)
        self._follow(job).started(self._alive_path(job).stat().st_mtime)
        return True

    def _spawn(
        self, command: Sequence[str], submission: JobSubmission, output: int, alive: int
    ) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                command,
                cwd=submission.folder,
                env={**submission.environment, **NO_ACCELERATORS},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[alive],
            )
        except OSError as error:
            raise RunRefused(f"cannot be started in {submission.folder}: {error.strerror}") from error

    def is_alive(self, job: str) -> bool:
        if (process := self._processes.get(job)) is not None:
            process.poll()  # collects it, if it has ended
        return is_locked(self._alive_path(job))

    def exit_code(self, job: str) -> int | None:
        """Of a run that is not alive; None: it was killed, and left no record."""
        process, record = self._processes.pop(job, None), self._record(job)
        self._progress.pop(job, None)
        code = process.wait() if process is not None else None
        if code is not None and code >= 0:
            return code
        return record.exit_code if record is not None and record.status != "running" else None

    def progress(self, job: str) -> ProgressReport | None:
        return self._follow(job).read()

    def scale(self, job: str, placed: Sequence[int]) -> str | None:
        """Ask its run to change its size; returns why it does not, if so."""
        try:
            request_scale(self._folder.run_dir(job), workers=sum(placed))
        except (ManyhandsError, OSError) as error:
            return str(error)
        return None

    def notify(self, job: str) -> bool:
        """Ask its run to commit a checkpoint and end. May be repeated; False: it does not answer (yet)."""
        try:
            request_stop(self._folder.run_dir(job))
        except (ManyhandsError, OSError):
            return False
        return True

    def kill(self, job: str) -> None:
        """End its run at once: the guard of its agent ends its workers."""
        process, record = self._processes.get(job), self._record(job)
        pid = process.pid if process is not None else record.pid if record is not None else 0
        if not pid:
            return
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(pid)
            try:
                if is_locked(self._alive_path(job)):  # so it was alive after the pidfd was opened: it is that process
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)

    def _follow(self, job: str) -> RunProgress:
        if job not in self._progress:
            self._progress[job] = RunProgress(self._folder.run_dir(job))
        return self._progress[job]

    def _alive_path(self, job: str) -> Path:
        return self._folder.jobs / job / "alive"

    def _record(self, job: str) -> RunRecord | None:
        """The record of the newest start of its run; None if that has written none."""
        run_dir = self._folder.run_dir(job)
        try:
            if (run_dir / "run.json").stat().st_mtime_ns < self._alive_path(job).stat().st_mtime_ns:
                return None
            return read_run(run_dir)
        except (OSError, UsageError):
            return None


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _check_script(submission: JobSubmission) -> None:
    try:
        found = script_digest(submission.script)
    except OSError as error:
        raise RunRefused(f"{submission.script} cannot be read: {error.strerror}") from error
    if found != submission.digest:
        raise RunRefused(
            f"{submission.script} was changed after the job was submitted (sha256 {found[:8]}, was "
            f"{submission.digest[:8]}): mh submit it again"
        )


def run_command(submission: JobSubmission, run_dir: Path, workers: int, threads: int) -> list[str]:
    """The `mh run` of a job. Without a range of workers it is not elastic: its size is fixed."""
    elastic = ["--elastic", f"{submission.least}:{submission.most}"] if submission.least < submission.most else []
    return [
        *(submission.python, "-m", "manyhands.cli.main", "run", "--run-dir", str(run_dir)),
        *("-n", str(workers), *elastic, "--threads", str(threads), "--ui", "plain"),
        *submission.settings,
        *(submission.script, *submission.arguments),
    ]
