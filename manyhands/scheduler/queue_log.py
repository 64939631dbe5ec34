"""The queue on disk: every event, and what was decided on it, before anything is done about it.

A file begins with a state; events follow. A torn last line is ignored: nothing was done about it. A damaged line before
others means that the disk lost something, and the queue is not guessed. Start reading at `QueueLog.load`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from manyhands.control.line_log import LineLog
from manyhands.errors import EnvironmentProblem
from manyhands.scheduler.queue_state import QueueAction, QueueEvent, QueueState, react

__all__ = ["QueueEntry", "QueueLog"]

# Older events are replaced by the state that they led to. Every reader replays the rest: a few thousand events.
MAX_BYTES = 2**19


class QueueEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    at: float
    event: QueueEvent
    actions: list[QueueAction]
    """What `react` decided."""


class QueueLog:
    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._lines, self._max_bytes = path, LineLog(path), max_bytes

    def load(self) -> QueueState:
        """The state of the queue after the last whole line."""
        state, entries = self.read()
        for entry in entries:
            state, _ = react(state, entry.event, entry.at)
        return state

    def read(self) -> tuple[QueueState, Iterator[QueueEntry]]:
        """The state that the file begins with, and the events since."""
        lines = self._lines.read()
        if lines and lines[-1] is None:
            lines = lines[:-1]
        if None in lines:
            number = lines.index(None) + 1
            raise EnvironmentProblem(
                f"Line {number} of {len(lines)} of the queue's log is damaged.",
                where=str(self._path),
                fix=[f"move it away: mh cluster up takes the jobs from {self._path.parent / 'jobs'} again"],
            )
        whole = [line for line in lines if line is not None]
        try:
            state = msgspec.json.decode(whole[0], type=QueueState) if whole else QueueState()
            entries = [msgspec.json.decode(line, type=QueueEntry) for line in whole[1:]]
        except msgspec.MsgspecError as error:
            what = f"The queue's log was written by another version of manyhands: {error}."
            raise EnvironmentProblem(what, where=str(self._path), fix=["the version that wrote it"]) from error
        return state, iter(entries)

    def begin(self, state: QueueState) -> None:
        """Begin a new file with this state."""
        self._lines.begin_file([msgspec.json.encode(state)])

    def append(self, entry: QueueEntry, state: QueueState) -> None:
        """`state`: that after the event. On disk when this returns."""
        if self._lines.num_bytes is None or self._lines.num_bytes > self._max_bytes:
            self.begin(state)
        else:
            self._lines.append(msgspec.json.encode(entry))
