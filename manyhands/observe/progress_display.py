"""Progress display of a run: a bar on a terminal, a line per interval elsewhere.

A display receives events, output and failures from the launcher or, in a run of one process, from the trainer, by the
queue of `display_queue`. `event_text` formats the text. Start reading at `make_display`.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any, Literal, TextIO

import msgspec
from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from manyhands.events import (
    CheckpointSaved,
    EpochDone,
    Evaluated,
    Event,
    GenerationStarted,
    LaunchStarted,
    Logged,
    ResourcesUsed,
    Resumed,
    RunEnded,
    RunStarted,
    StepDone,
    Straggler,
    WorkerLost,
)
from manyhands.observe.display_queue import QueuedDisplay, ScriptOutput
from manyhands.observe.event_text import Tally, details_of, line_of, slow_line, used_lines, waiting_line
from manyhands.observe.terminal import (
    BottomLines,
    columns,
    is_terminal,
    prints_above,
    same_terminal,
)

if TYPE_CHECKING:
    from manyhands.control.messages.launch_request import Display

__all__ = ["make_display"]

REDRAW_S = 0.2  # a redraw costs half a millisecond: a quarter of a percent of one core
INTERVAL_S = 5.0
EPOCH_INTERVAL_S = 1.0
# After a worker is lost, the run either continues without it or fails and says why: this is known within this time.
CHANGE_DELAY_S = 3.0
STOPPED_CODES = (75, 130, 143)
# How long a line of ours waits at most for the end of the script's line.
LINE_END_WITHIN_S = 0.5


def make_display(
    ui: Literal["auto", "live", "plain", "none"],
    *,
    stdout: TextIO,
    stderr: TextIO,
    no_color: bool = False,
    force_color: bool = False,
    ci: bool = False,
    solo: bool = False,
    verbose: bool = False,
    interval_s: float = INTERVAL_S,
) -> Display:
    """The display for these streams. `auto` is live on a terminal and plain elsewhere, and plain under `ci`.

    Progress goes to `stderr`, so `stdout` has only what the training script printed. With `solo` the script runs in
    this process: a live display then replaces `sys.stdout` and `sys.stderr` until `close`, if they are its terminal, to
    keep the bar below the script's output. `verbose` adds details.
    """
    if ui == "auto":
        ui = "live" if is_terminal(stderr) and not ci else "plain"
    if ui == "live":
        color = not no_color and (force_color or is_terminal(stderr))
        return _Live(stdout, stderr, verbose=verbose, color=color, solo=solo)
    if ui == "plain":
        return _Plain(stdout, stderr, interval_s, verbose=verbose)
    return _FailuresOnly(stdout, stderr)


class _FailuresOnly(QueuedDisplay):
    """`--ui none`: only the chief's output and failures."""

    def say(self, line: str) -> None:
        pass

    def event(self, event: Event) -> None:
        pass


class _Narrated(QueuedDisplay):
    """Common to plain and live: a tally of the steps, and which other events get a line, how often."""

    def __init__(self, stdout: TextIO, stderr: TextIO, interval_s: float, *, verbose: bool) -> None:
        self._interval_s, self._verbose = interval_s, verbose
        self._tally = Tally()
        self._began: float | None = None
        self._seen_generation = False
        # These may occur many times a second: only the newest of a kind gets a line, once per interval.
        self._delayed: dict[type, Event] = {}
        self._last_line: dict[type, float] = {}
        self._every_s: dict[type, float] = {EpochDone: EPOCH_INTERVAL_S, Evaluated: EPOCH_INTERVAL_S}
        self._changes: list[tuple[float, WorkerLost | GenerationStarted]] = []
        self._named_slow: set[int] = set()
        self._has_failed = False
        self._used: dict[int, ResourcesUsed] = {}
        self._slow: dict[int, Straggler] = {}
        super().__init__(stdout, stderr)

    def _show_event(self, event: Event) -> None:
        match event:
            case StepDone():
                self._tally.add(event)
                self._release_changes()
            case CheckpointSaved() | Logged() | EpochDone() | Evaluated():
                self._delay(event)
            case Straggler():
                self._note_slow(event)
            case WorkerLost():
                self._changes.append((time.monotonic(), event))
            case ResourcesUsed():
                self._used[event.rank] = event  # shown at the end of the run
            case LaunchStarted():
                self._seen_generation = False
                self._narrate(event)
            case GenerationStarted() if not self._seen_generation:
                self._seen_generation = True  # the first one is the start of the run, which has its own line
            case GenerationStarted():
                self._forget_slow()
                self._changes.append((time.monotonic(), event))
            case RunStarted() if self._began is not None and (event.call != "fit" or event.attempt == 1):
                self._tally.total_steps = event.total_steps  # a further call of the same run
            case _:
                self._narrate(event)

    def _narrate(self, event: Event) -> None:
        now = time.monotonic()
        if isinstance(event, RunStarted):
            self._forget_slow()
            self._began = self._began or now
            self._tally.total_steps = event.total_steps
            event = msgspec.structs.replace(event, run=_from_here(event.run))
        if isinstance(event, Resumed):
            event = msgspec.structs.replace(event, path=_from_here(event.path))
        if isinstance(event, RunEnded):
            self._end(event, now)
        else:
            self._release_results(now)
            self._release_changes()
        if isinstance(event, RunEnded) and self._has_failed:
            return  # the failure block says it already
        line = line_of(event, elapsed_s=None if self._began is None else now - self._began)
        if line is not None:
            self._line(line)
        if isinstance(event, RunStarted) and self._verbose:
            self._line(details_of(event))

    def _end(self, event: RunEnded, now: float) -> None:
        if self._has_failed or event.exit_code in STOPPED_CODES:
            self._changes.clear()  # workers that were stopped on request are not lost
        self._delayed.pop(Straggler, None)
        self._before_result(now, last=True)
        if self._verbose:
            for text in used_lines(self._used.values()):
                self._line(f"used by {text}")
        for slow in self._slow.values():
            if not slow.is_over:
                self._line(f"since step {slow.step} {slow_line(slow)}")

    def _show_line(self, line: str) -> None:
        self._release_changes()
        super()._show_line(line)

    def _show_failure(self, block: str) -> None:
        self._changes.clear()
        self._delayed.pop(Straggler, None)
        self._has_failed = True
        self._before_result(time.monotonic(), last=True)
        super()._show_failure(block)

    def _forget_slow(self) -> None:
        """The ranks belong to other workers now."""
        self._slow.clear()
        self._named_slow.clear()

    def _note_slow(self, event: Straggler) -> None:
        self._slow = {rank: one for rank, one in self._slow.items() if one.generation == event.generation}
        self._slow[event.rank] = event
        if event.is_over and event.rank not in self._named_slow:
            self._delayed.pop(Straggler, None)  # it was over before a line was shown
        else:
            self._delay(event)

    def _delay(self, event: Event) -> None:
        self._delayed[type(event)] = event
        now = time.monotonic()
        if self._is_due(type(event), now):
            self._release(type(event), event, now)

    def _is_due(self, kind: type, now: float) -> bool:
        every_s = min(self._every_s.get(kind, self._interval_s), self._interval_s)
        return now - self._last_line.get(kind, -every_s) >= every_s

    def _tick(self, now: float) -> None:
        for kind, event in list(self._delayed.items()):
            if self._is_due(kind, now):
                self._release(kind, event, now)
        if self._changes and now - self._changes[0][0] >= CHANGE_DELAY_S:
            self._release_changes()

    def _release(self, kind: type, event: Event, now: float) -> None:
        del self._delayed[kind]
        if isinstance(event, EpochDone):
            self._before_result(now, last=False)
        if isinstance(event, Straggler):
            (self._named_slow.discard if event.is_over else self._named_slow.add)(event.rank)
        self._last_line[kind] = now
        self._line(line_of(event) or "")

    def _release_results(self, now: float) -> None:
        """Results that came before another line are shown before it."""
        for kind in (EpochDone, Evaluated):
            if kind in self._delayed:
                self._release(kind, self._delayed[kind], now)

    def _release_changes(self) -> None:
        changes, self._changes = self._changes, []
        for _, event in changes:
            if (line := line_of(event)) is not None:
                self._line(line)

    def _finish(self) -> None:
        self._before_result(time.monotonic(), last=True)

    def _before_result(self, now: float, *, last: bool) -> None:
        """Show everything pending before an epoch's result or the end."""
        if last:
            self._release_changes()
            for kind, event in list(self._delayed.items()):
                self._release(kind, event, now)


class _Plain(_Narrated):
    """For pipes and log files: whole lines, no colours, no carriage returns."""

    def __init__(self, stdout: TextIO, stderr: TextIO, interval_s: float, *, verbose: bool) -> None:
        self._is_within_line, self._end_due_at = False, 0.0
        self._held: list[str] = []
        super().__init__(stdout, stderr, interval_s, verbose=verbose)

    def _pass_on(self, output: ScriptOutput) -> None:
        """A line of ours waits for the end of the script's: its `print` is two writes, the text and the line's end."""
        super()._pass_on(output)
        ends = output.data.endswith(b"\n")
        if not ends and not self._is_within_line:
            self._end_due_at = time.monotonic() + LINE_END_WITHIN_S
        self._is_within_line = not ends
        if ends:
            self._show_held()

    def _line(self, text: str) -> None:
        if self._is_within_line and time.monotonic() < self._end_due_at:
            self._held.append(text)
        else:
            self._show_held()
            super()._line(text)

    def _show_held(self) -> None:
        held, self._held = self._held, []
        for text in held:
            super()._line(text)

    def _show_failure(self, block: str) -> None:
        self._end_due_at = 0.0  # at once: it may come from another thread, while the output waits for its reader
        super()._show_failure(block)

    def _finish(self) -> None:
        self._end_due_at = 0.0
        self._show_held()
        super()._finish()

    def _tick(self, now: float) -> None:
        if now >= self._end_due_at:
            self._show_held()
        super()._tick(now)
        if now - self._last_line.get(StepDone, -self._interval_s) >= self._interval_s:
            self._steps_line(now)

    def _before_result(self, now: float, *, last: bool) -> None:
        super()._before_result(now, last=last)
        if last or now - self._last_line.get(StepDone, now) >= 1.0:  # short epochs: their result lines are enough
            self._steps_line(now)

    def _steps_line(self, now: float) -> None:
        if self._tally.fresh:
            self._last_line[StepDone] = now
            self._line(self._tally.line())
            self._tally.fresh = False
            self._tally.forget()


class _Live(_Narrated):
    """For terminals: two lines at the bottom, redrawn in place five times a second; the rest scrolls above."""

    def __init__(self, stdout: TextIO, stderr: TextIO, *, verbose: bool, color: bool, solo: bool) -> None:
        self._bar = BottomLines(stderr)
        self._console = Console(
            file=stderr, force_terminal=True, no_color=not color, color_system="standard" if color else None,
            highlight=False, legacy_windows=False, _environ={},
        )  # fmt: skip
        self._drawn_at = self._decayed_at = 0.0
        self._note = ""
        self._launch: tuple[LaunchStarted, float] | None = None
        self._above = {
            name for name, stream in (("stdout", stdout), ("stderr", stderr)) if same_terminal(stream, stderr)
        }
        self._prints = contextlib.ExitStack()
        super().__init__(stdout, stderr, INTERVAL_S, verbose=verbose)
        if solo:
            self._prints.enter_context(prints_above(self._bar, stderr))

    def close(self) -> None:
        super().close()
        self._prints.close()

    def _show_event(self, event: Event) -> None:
        if isinstance(event, CheckpointSaved):
            self._note = f"saved step {event.step}"  # in the bar, which is always visible, so no line is needed
        elif isinstance(event, LaunchStarted):
            self._launch, self._seen_generation = (event, time.monotonic()), False
        else:
            super()._show_event(event)

    def _launched(self) -> None:
        """The first message from, or about, the workers has arrived: stop showing that they start."""
        if self._launch is not None:
            self._launch = None
            self._bar.erase()

    def _pass_on(self, output: ScriptOutput) -> None:
        self._launched()
        if output.stream in self._above:
            self._bar.above(output.data)
        else:
            super()._pass_on(output)

    def _line(self, text: str) -> None:
        self._launched()
        self._bar.above(text.rstrip("\n").encode(errors="replace") + b"\n", whole_line=True)

    def _tick(self, now: float) -> None:
        super()._tick(now)
        if self._launch is not None and not self._tally.step and now - self._drawn_at >= REDRAW_S:
            event, since = self._launch
            self._bar.draw([waiting_line(event, now - since)[: self._width()]])
            self._drawn_at = now
        if now - self._drawn_at >= REDRAW_S and self._tally.step and (self._tally.fresh or not self._bar.is_up):
            self._bar.draw(self._lines())
            self._drawn_at, self._tally.fresh = now, False
        if now - self._decayed_at >= 1.0:
            self._decayed_at = now
            self._tally.forget(0.3)

    def _before_result(self, now: float, *, last: bool) -> None:
        super()._before_result(now, last=last)
        if last and self._tally.step:
            self._bar.erase()
            self._line(self._tally.line())
            self._tally = Tally()  # no bar any more, unless another call of fit follows

    def _finish(self) -> None:
        super()._finish()
        self._bar.erase()

    def _width(self) -> int:
        return max(columns(self._streams["stderr"]) - 1, 20)

    def _lines(self) -> list[str]:
        width = self._width()
        tally, speed = self._tally, "  ".join(self._tally.speed())
        percent = f"{100 * tally.step / tally.total_steps:3.0f}%  " if tally.total_steps else ""
        bar_width = min(40, width - len(tally.where()) - len(percent) - len(speed) - 2)
        first = Table.grid(padding=(0, 1, 0, 0))
        cells: list[Any] = [Text(tally.where(), style="bold"), Text(percent + speed)]
        if tally.total_steps and bar_width >= 8:
            cells.insert(1, ProgressBar(tally.total_steps, tally.step, width=bar_width))
        first.add_row(*cells)
        second = Text("  ".join(part for part in (tally.shares(), self._note) if part), style="dim")
        return [self._rendered(renderable, width) for renderable in (first, second)]

    def _rendered(self, renderable: Table | Text, width: int) -> str:
        with self._console.capture() as captured:
            self._console.print(renderable, width=width, no_wrap=True, overflow="crop", crop=True)
        return captured.get().split("\n", 1)[0].rstrip()


def _from_here(path: str) -> str:
    """A path relative to this directory, if it is below it."""
    near = os.path.relpath(path)
    return path if near.startswith("..") else near
