"""A process beside a run that evaluates its checkpoints: the evaluator of a cluster, or `mh evaluate`.

`EvaluatorSession` replaces the session with an agent. It waits until the run has begun, and says when it is over; in
the run directory it writes only its own file of events. Start reading at `EvaluatorSession.join`.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import msgspec

from manyhands.control.run_directory import RunRecord, read_run
from manyhands.control.session.run_session import RunSession
from manyhands.control.session.session import RunFacts
from manyhands.errors import EnvironmentProblem, RunDirectoryInUse, UsageError
from manyhands.events import Event, encode
from manyhands.launcher.launch import open_display
from manyhands.launcher.script_exit import ending
from manyhands.launcher.solo_run import SoloSession
from manyhands.observe.run_status import state_of
from manyhands.private_files import open_private
from manyhands.spec.load import Resolved, environment

__all__ = ["EvaluatorSession", "Patience", "record_of"]

RECORD = "evaluator.jsonl"
LOCK = "evaluator.lock"
NICENESS = 10
"""The training's processes have 0: where both want a core, they get about nine tenths of it."""


class Patience(msgspec.Struct, frozen=True):
    """How long an evaluator waits, in seconds."""

    start_s: float = 600.0
    """For the run to begin."""
    resume_s: float = 600.0
    """For a run that stopped, failed or died to be resumed."""
    poll_s: float = 0.5


def record_of(session: RunSession) -> str:
    """The name of the file of events that this process writes, if it is the first of its group."""
    return RECORD if isinstance(session, EvaluatorSession) else "chief.jsonl"


class EvaluatorSession(SoloSession):
    """The only worker of an evaluation beside the run in `path`."""

    def __init__(
        self, resolved: Resolved, path: Path, patience: Patience | None = None, *, as_json: bool = False
    ) -> None:
        super().__init__(resolved)
        self.patience = patience or Patience()
        self._path, self._started_s = path.absolute(), time.time()
        self._lock_fd: int | None = None
        self._as_json = as_json
        self._down_since: float | None = None

    @property
    def run_dir(self) -> Path:
        return self._path

    def takes(self, other: Resolved) -> bool:
        return True  # a script's later trainings are in the same run directory

    def join(self, facts: RunFacts) -> None:
        if self._lock_fd is not None:  # for an earlier training of the script
            return
        if not self._as_json:
            self._display = open_display(self._resolved, environment(), solo=True)
        ending.add_run(self)
        os.nice(max(0, NICENESS - os.nice(0)))
        self.wait_for_start()
        self._lock_fd = _lock(self._path)
        self._say(f"evaluating the checkpoints of {self._path}, beside the training")

    def wait_for_start(self) -> None:
        """`EnvironmentProblem` if the run's record does not appear in time: no run, or no shared directory."""
        deadline, waits = time.monotonic() + self.patience.start_s, False
        while not self._has_begun(self._record()):
            if not waits:
                waits = True
                self._say(f"waiting for the run in {self._path} to begin")
            if time.monotonic() > deadline:
                raise EnvironmentProblem(
                    f"No run began in {self._path} within {self.patience.start_s:g} s, as far as this host can see.",
                    fix=[
                        "start the run's other tasks",
                        "--run-dir (or run_dir=) with a directory that this host shares with the run's first host",
                    ],
                )
            time.sleep(self.patience.poll_s)

    def is_over(self) -> bool:
        """Whether the run has finished. `EnvironmentProblem` if it has been down for too long to be resumed."""
        record = self._record()
        state = state_of(record) if record is not None else "unknown"
        if state in ("finished", "running"):
            self._down_since = None
            return state == "finished"
        now, limit_s = time.monotonic(), self.patience.resume_s
        if self._down_since is None:
            self._down_since = now
            self._say(f"the run is down ({state}); waiting up to {limit_s:g} s for it to be resumed")
        if now - self._down_since > limit_s:
            raise EnvironmentProblem(
                f"The run in {self._path} is down ({state}), and was not resumed within {limit_s:g} s.",
                fix=["resume the run, and start the evaluator again: it evaluates what is left"],
            )
        return False

    def _has_begun(self, record: RunRecord | None) -> bool:
        """A finished run does not count if the run that this process waits for is to overwrite it."""
        if record is None:
            return False
        is_old = state_of(record) == "finished" and _modified_s(self._path / "run.json") < self._started_s
        return not (is_old and self._resolved.spec.run.overwrite)

    def _record(self) -> RunRecord | None:
        try:
            return read_run(self._path)
        except UsageError:  # not there yet, or for a moment unreadable on a file system of several hosts
            return None

    def publish(self, event: Event) -> None:
        if self._as_json:
            print(encode(event).decode(), flush=True)
        super().publish(event)

    def _say(self, line: str) -> None:
        if self._display is not None:
            self._display.say(line)

    def end(self, code: int, error: BaseException | None) -> None:
        """The script has ended. The run's own record and status are not touched."""
        if self.recorder is not None:
            self.recorder.close(timeout_s=5.0)
        if self._display is not None:
            self._display.close()

    def resume_lines(self) -> list[str]:
        return []


def _lock(run_dir: Path) -> int:
    """One evaluator at a time: two would take each other's results for their own."""
    try:
        fd = open_private(run_dir / "events" / LOCK, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise EnvironmentProblem(
            f"The evaluator cannot write to {run_dir / 'events'}: {error.strerror}.",
            fix=["start it as the user of the run"],
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise RunDirectoryInUse(
            f"Another process evaluates the checkpoints of {run_dir}.", fix=[f"mh status {run_dir}, for its results"]
        ) from None
    return fd


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
