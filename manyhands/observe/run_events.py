"""The events of a whole run for programs: `mh.read_events(run)`."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path

from manyhands.errors import UsageError
from manyhands.events import Event
from manyhands.observe import recorder

__all__ = ["read_events"]


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
