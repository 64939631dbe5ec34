"""The agent's side of the run directory: adopts it when its name is known, and writes the agent's events to it.

On the launching host `AgentRecord` owns and locks the directory; on other hosts it only writes logs and events there.
Until the directory is known, events wait in bounded memory.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from pathlib import Path

import msgspec

from manyhands.control.membership.state import parse_generation
from manyhands.control.run_directory import RunDirectory, default_path
from manyhands.errors import EnvironmentProblem
from manyhands.events import Event, encode
from manyhands.private_files import make_directory, open_private

__all__ = ["AgentRecord"]

EARLY_EVENTS = 1000


class AgentRecord:
    def __init__(self, run: str, command: list[str], endpoint: str, *, group_readable: bool = False) -> None:
        self.run = run
        self.directory: RunDirectory | None = None
        self.log_base = 0
        self.dropped = 0
        self.host = 0
        self._command, self._endpoint, self._group_readable = command, endpoint, group_readable
        self._provisional = False
        self._discard: Path | None = None
        self._events: int | None = None
        self._early: deque[bytes] = deque(maxlen=EARLY_EVENTS)

    @property
    def path(self) -> str | None:
        return str(self.directory.path) if self.directory else None

    def term_floor(self) -> int:
        """Higher than any term in this directory or of an earlier launch: the directory may be named later."""
        before = self.directory.last_generation if self.directory else None
        return max(int(time.time()), parse_generation(before)[0] + 1 if before else 0)

    def adopt(self, path: str | None, overwrite: bool, generation: str | None = None) -> bool:
        """Own the directory; without a path, one named after the run. True when the directory changed.

        A default that was adopted only because time passed is replaced if the script names one later.
        """
        if self.directory is not None:
            same = path is None or Path(path).absolute() == self.directory.path
            if same or not self._provisional:
                return False
        before = self.directory
        target = path if path is not None else default_path(self.run)
        directory = RunDirectory.adopt(
            target,
            overwrite,
            group_readable=self._group_readable,
            run=self.run,
            command=self._command,
            endpoint=self._endpoint,
        )
        self._check_clock(directory, generation)
        self.directory, self._provisional = directory, path is None
        self.log_base = directory.last_attempt()
        if generation is not None:
            directory.note_generation(generation)
        self._open_events()
        if before is not None:
            before.release()
            self._discard = before.path
        return True

    def _check_clock(self, directory: RunDirectory, generation: str | None) -> None:
        before = directory.last_generation
        if generation is None or before is None or parse_generation(generation) > parse_generation(before):
            return
        directory.release()
        raise EnvironmentProblem(
            f"The last generation in {directory.path} is {before}, later than this launch's {generation}: "
            "the clock of this host went back.",
            fix=["set the clock", "name the directory with --run-dir"],
        )

    def discard_provisional(self) -> None:
        """Remove a default directory that was replaced; its logs have been moved."""
        if self._discard is not None:
            shutil.rmtree(self._discard, ignore_errors=True)
            self._discard = None

    def leave_provisional(self) -> None:
        """Release and remove a directory that was adopted only because time passed."""
        if self.directory is not None and self._provisional:
            self._close_events()
            self.directory.release()
            shutil.rmtree(self.directory.path, ignore_errors=True)
            self.directory = None

    def visit(self, path: str, log_base: int) -> bool:
        """Write logs into another host's directory, if that is possible."""
        if self.directory is not None:
            return False
        try:
            self.directory = RunDirectory.visit(path, self.run)
        except OSError:
            return False
        self.log_base = log_base
        self._open_events()
        return True

    def logs(self, attempt: int) -> Path | None:
        return self.directory.logs(self.log_base + attempt) if self.directory else None

    def note_generation(self, generation: str) -> None:
        if self.directory is not None:
            self.directory.note_generation(generation)

    def event(self, event: Event) -> None:
        line = encode(msgspec.structs.replace(event, time_s=event.time_s or time.time())) + b"\n"
        if self._events is None:
            self._early.append(line)
        else:
            self._write(line)

    def _open_events(self) -> None:
        assert self.directory is not None
        self._close_events()
        try:
            make_directory(self.directory.events)
            path = self.directory.events / f"agent-{self.host}.jsonl"
            self._events = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        except OSError:
            return
        while self._early:
            self._write(self._early.popleft())

    def _write(self, line: bytes) -> None:
        assert self._events is not None
        try:
            os.write(self._events, line)
        except OSError:
            self.dropped += 1

    def _close_events(self) -> None:
        if self._events is not None:
            os.close(self._events)
            self._events = None

    def close(self, exit_code: int) -> None:
        self._close_events()
        if self.directory is not None:
            status = {0: "finished", 75: "stopped", 130: "stopped", 143: "stopped"}.get(exit_code, "failed")
            self.directory.mark(status, exit_code)  # type: ignore[arg-type]
            self.directory.release()
