"""The events of a run: `RunEvents` takes those of a training in a worker, `mh.read_events(run)` yields those of all."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec.structs import replace

from manyhands.control.session.run_session import RunSession
from manyhands.errors import UsageError
from manyhands.events import Event, Warned
from manyhands.observe import recorder
from manyhands.observe.recorder import Recorder

__all__ = ["RunEvents", "read_events"]


class RunEvents:
    """Where one training in one worker reports what happens. Never blocks, never raises.

    Every event goes to the agent, which shows it. The chief also writes it to the record of the run; events of other
    workers are recorded by their agent. Which worker is the chief may change with every generation.
    """

    def __init__(self, session: RunSession, record: Callable[[], Recorder | None], training: int) -> None:
        """`record` returns the record that the trainings of a script share; None before it is open."""
        self._session, self._record, self._training = session, record, training

    def emit(self, event: Event) -> None:
        """An event of the run, which every worker may report: that of the chief counts."""
        if self._session.group.rank == 0:
            self.emit_own(event)

    def emit_own(self, event: Event) -> None:
        """An event of this worker only."""
        if self._training > 1 and hasattr(event, "training"):
            event = replace(event, training=self._training)
        if self._session.group.rank == 0 and (record := self._record()) is not None:
            record.emit(event)
        self._session.publish(event)

    def warn(self, text: str) -> None:
        """A warning of the run."""
        self.emit(Warned(text=text))


def read_events(run: str | Path) -> Iterator[Event]:
    """The events of a run, live or ended, oldest first: those of the chief and of every host's agent, by time.

    Each is an object of one of the classes in `manyhands.events`, such as `StepDone`. For a live run it yields what has
    been written so far, which lags by up to half a second. A line that is being written, or was torn by a crash, is
    skipped, and so are kinds of events that a later version wrote. Times of several hosts are by their own clocks.
    Epochs count from 0 in events, and from 1 in the printed output of a run.

    Args:
        run: The run directory, such as "runs/20261118-train". `UsageError` if it contains no run.
    """
    folder = Path(run) / "events"
    if not folder.is_dir():
        raise UsageError(f"{run} is not the directory of a run: it has no events.", fix=["mh status, for all runs"])
    return _merged(sorted(folder.glob("*.jsonl")))


def _merged(files: list[Path]) -> Iterator[Event]:
    streams = (_timed(number, path) for number, path in enumerate(files))
    for *_, event in heapq.merge(*streams, key=lambda one: one[:2]):
        yield event


def _timed(number: int, path: Path) -> Iterator[tuple[float, int, Event]]:
    """A file's events in their order, even if the clock was set back: the latest time so far, file number, event."""
    latest = 0.0
    for event in recorder.read_events(path):
        latest = max(latest, event.time_s)
        yield latest, number, event
