"""The lines of the demo's second part in another language than English, in which runs report: one for each main event.

In English the run's own display is shown. Start reading at `NarratingDisplay`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from manyhands.control.messages.failure import Failure, render
from manyhands.events import Event, GenerationStarted, RunEnded, StepDone
from manyhands.observe.event_text import clean, size

__all__ = ["NarratingDisplay", "line_in"]

PROGRESS_EVERY_S = 0.2


class NarratingDisplay:
    """A display of one run: `say` prints a line for good, `progress` one that the next replaces."""

    def __init__(
        self, lines: Mapping[str, str], say: Callable[[str], None], progress: Callable[[str], None], *, quiet: bool
    ) -> None:
        self._lines, self._say, self._progress, self._quiet = lines, say, progress, quiet
        self._shown_at = 0.0

    def event(self, event: Event) -> None:
        if self._quiet or (line := line_in(self._lines, event)) is None:
            return
        if not isinstance(event, StepDone):
            self._say(line)
        elif time.monotonic() >= self._shown_at + PROGRESS_EVERY_S:
            self._shown_at = time.monotonic()
            self._progress(line)

    def output(self, rank: int, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        if stream == "stderr" and not self._quiet:  # what the program prints of its result is in the summary
            self._say(data.decode(errors="replace").rstrip("\n"))

    def say(self, line: str) -> None: ...  # who joined and how to resume: the narration says so, too

    def failure(self, block: Failure) -> None:
        self._say(render(block))

    def close(self) -> None: ...


def line_in(lines: Mapping[str, str], event: Event) -> str | None:
    """The event by its format in `lines`; None if there is none, or if a number that it needs is not known."""
    name = type(event).__name__
    if isinstance(event, GenerationStarted) and not event.why:
        return None  # the first one
    if isinstance(event, RunEnded):
        name += "" if event.exit_code == 0 else "Early"
    if name not in lines or (isinstance(event, StepDone) and not event.total_steps):
        return None
    fields: dict[str, Any] = {field: getattr(event, field) for field in event.__struct_fields__}
    for field, value in fields.items():
        if isinstance(value, str):
            fields[field] = clean(value)
    fields["num_bytes"] = size(fields["num_bytes"]) if "num_bytes" in fields else ""
    return lines[name].format(**fields)
