"""What a person sees of a run while it trains: a bar on a terminal, a line per interval elsewhere.

A display takes events, output and failures from the launcher or, in a run of one process, from the trainer. It puts
them into a queue and returns; one thread does all the showing, so neither a slow terminal nor a closed pipe can hold
up or stop a step. How things are worded is `event_text.py`'s business. Start reading at `make_display`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TextIO

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
from manyhands.observe.event_text import Tally, details_of, line_of, size, slow_line, used_lines, waiting_line
from manyhands.observe.output_spool import MAX_IN_MEMORY_BYTES, Kept, Spool
from manyhands.observe.terminal import (
    BottomLines,
    columns,
    is_terminal,
    prints_above,
    same_file,
    same_terminal,
    write_bytes,
)

if TYPE_CHECKING:
    from manyhands.control.messages.failure import Failure
    from manyhands.control.messages.launch_request import Display

__all__ = ["make_display"]

TICK_S = 0.1
REDRAW_S = 0.2  # a redraw costs half a millisecond: a quarter of a percent of one core
INTERVAL_S = 5.0
EPOCH_INTERVAL_S = 1.0
# The others go on without a lost worker, or the run ends and says why: which of the two, is known within this time.
CHANGE_HELD_S = 3.0
STOPPED_CODES = (75, 130, 143)
CLOSE_TIMEOUT_S = 2.0
MAX_EVENTS_WAITING = 10_000
# Of steps in a row within one tick: how their time is shared out shows in a few as well as in thousands, and a thread
# that looks at each takes the interpreter from the one that trains.
MAX_STEPS_LOOKED_AT = 16
MAX_OUTPUT_WAITING_BYTES = MAX_IN_MEMORY_BYTES
MAX_REMEMBERED_BYTES = 20_000


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

    Progress goes to `stderr`, so `stdout` holds what the training script printed and nothing else. With `solo` the
    script's prints happen in this very process: a live display then takes over `sys.stdout` and `sys.stderr` until
    `close`, where they lead to its terminal, to keep the bar below them. `verbose` adds what only some want to know.
    """
    if ui == "auto":
        ui = "live" if is_terminal(stderr) and not ci else "plain"
    if ui == "live":
        color = not no_color and (force_color or is_terminal(stderr))
        return _Live(stdout, stderr, verbose=verbose, color=color, solo=solo)
    if ui == "plain":
        return _Plain(stdout, stderr, interval_s, verbose=verbose)
    return _FailuresOnly(stdout, stderr)


class _Output:
    """Bytes that the chief wrote, on their way to one of our own streams."""

    def __init__(self, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        self.stream, self.data = stream, data


class _Spooled(NamedTuple):
    """The same, while they are in a file."""

    stream: Literal["stdout", "stderr"]
    kept: Kept


class _Due(str):
    """Lines that the end waits for, as it does for output."""


class _Failed(_Due):
    """A failure, as text of several lines."""


class _Queued:
    """Takes everything at once; shows it from one thread. Subclasses say how, and may not be called by others."""

    def __init__(self, stdout: TextIO, stderr: TextIO) -> None:
        self._streams: dict[str, TextIO] = {"stdout": stdout, "stderr": stderr}
        self._gone: set[str] = set()
        self._queue: deque[Event | _Output | _Spooled | str] = deque()
        self._stepped = False
        # How much output came in and went out, each changed by one thread only, so that no lock is needed.
        self._bytes_in = self._bytes_out = 0
        self._bytes_skipped = 0
        self._last_errors = b""
        self._spool = Spool()
        self._run = "RUN"
        self._are_apart = not same_file(stdout, stderr)
        self._urgent: list[threading.Thread] = []
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="manyhands-display", daemon=True)
        self._thread.start()

    def event(self, event: Event) -> None:
        """Never blocks, never raises; what a stuck terminal cannot show is not shown."""
        if isinstance(event, RunStarted):
            self._run = event.run
        if len(self._queue) < MAX_EVENTS_WAITING:
            self._queue.append(event)
        if isinstance(event, StepDone):
            if self._stepped:
                return  # the first step is shown at once; further ones are looked at ten times a second
            self._stepped = True
        self._wake.set()

    def output(self, rank: int, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        """Pass the chief's output on. Never waits for its reader: behind 64 MB in memory, more waits in a file.

        What that does not take, because the disk is full, is skipped, and said so.
        """
        item: _Output | _Spooled = _Output(stream, data)
        if self._bytes_in - self._bytes_out > MAX_OUTPUT_WAITING_BYTES:
            kept = self._spool.put(data)
            if kept is None:
                self._bytes_skipped += len(data)
                return
            item = _Spooled(stream, kept)
        self._say_skipped()
        self._bytes_in += len(data)
        self._put(item)
        if stream == "stderr":
            self._last_errors = (self._last_errors + data)[-MAX_REMEMBERED_BYTES:]

    def _say_skipped(self) -> None:
        if self._bytes_skipped:
            what = f"{size(self._bytes_skipped)} of output not shown, as its reader paused and the disk is full"
            self._due(_Due(f"warning: {what}; the whole log: mh logs {self._run} --rank 0"))
            self._bytes_skipped = 0

    def say(self, line: str) -> None:
        self._put(line)

    def failure(self, block: Failure) -> None:
        from manyhands.control.messages.failure import render

        seen = self._last_errors.decode(errors="replace").splitlines()
        text = render(block, seen=seen)
        if not self._are_apart or self._bytes_out == self._bytes_in:
            self._due(_Failed(text))
            return
        # Output waits for its reader, perhaps for long. What went wrong is for another reader, and goes ahead.
        thread = threading.Thread(target=self._failed, args=(text,), name="manyhands-failure", daemon=True)
        self._urgent.append(thread)
        thread.start()

    def _due(self, item: _Due) -> None:
        self._bytes_in += len(item)
        self._put(item)

    def close(self) -> None:
        """Show what is left, for at most two seconds; output and failures for as long as their reader takes."""
        self._say_skipped()
        self._closing = True
        self._wake.set()
        for thread in (self._thread, *self._urgent):
            thread.join(CLOSE_TIMEOUT_S)
        while self._bytes_out < self._bytes_in and self._thread.is_alive():
            self._thread.join(TICK_S)
        self._thread.join(CLOSE_TIMEOUT_S)  # for what stood behind it
        if not self._thread.is_alive():
            self._spool.close()

    def _put(self, item: _Output | _Spooled | str) -> None:
        self._queue.append(item)
        self._wake.set()

    def _work(self) -> None:
        while not self._closing:
            self._wake.wait(TICK_S)
            self._wake.clear()
            self._turn()
        self._turn()
        with _nothing_escapes():
            self._finish()

    def _turn(self) -> None:
        steps: deque[StepDone] = deque(maxlen=MAX_STEPS_LOOKED_AT)
        while self._queue:
            item = self._queue.popleft()
            if isinstance(item, StepDone):
                steps.append(item)
                if self._queue:
                    continue
            with _nothing_escapes():
                while steps:
                    self._shown_event(steps.popleft())
                if not isinstance(item, StepDone):
                    self._show(item)
        with _nothing_escapes():
            self._tick(time.monotonic())

    def _show(self, item: Event | _Output | _Spooled | str) -> None:
        if isinstance(item, _Output | _Spooled):
            output = item if isinstance(item, _Output) else _Output(item.stream, self._spool.take(item.kept))
            try:
                self._pass_on(output)
            finally:
                self._bytes_out += len(output.data) if isinstance(item, _Output) else item.kept.num_bytes
        elif isinstance(item, _Due):
            try:
                (self._failed if isinstance(item, _Failed) else self._said)(item)
            finally:
                self._bytes_out += len(item)
        elif isinstance(item, str):
            self._said(item)
        else:
            self._shown_event(item)

    def _pass_on(self, output: _Output) -> None:
        self._write(output.stream, output.data)

    def _said(self, line: str) -> None:
        self._line(line)

    def _failed(self, block: str) -> None:
        self._line(block)

    def _line(self, text: str) -> None:
        """A whole line, or several, to stderr."""
        self._write("stderr", text.rstrip("\n").encode(errors="replace") + b"\n")

    def _write(self, stream: str, data: bytes) -> None:
        if stream in self._gone:
            return
        try:
            write_bytes(self._streams[stream], data)
        except (OSError, ValueError):  # the reader went away, or the stream was closed: the run goes on without it
            self._gone.add(stream)

    def _shown_event(self, event: Event) -> None: ...

    def _tick(self, now: float) -> None: ...

    def _finish(self) -> None: ...


class _FailuresOnly(_Queued):
    """`--ui none`: the chief's output and failures; not a word else."""

    def say(self, line: str) -> None:
        pass

    def event(self, event: Event) -> None:
        pass


class _Narrated(_Queued):
    """What plain and live have in common: a tally of the steps, and which other events get a line, how often."""

    def __init__(self, stdout: TextIO, stderr: TextIO, interval_s: float, *, verbose: bool) -> None:
        self._interval_s, self._verbose = interval_s, verbose
        self._tally = Tally()
        self._began: float | None = None
        self._seen_generation = False
        # These may come many times a second: the newest of a kind gets a line, once per interval.
        self._held: dict[type, Event] = {}
        self._last_line: dict[type, float] = {}
        self._every_s: dict[type, float] = {EpochDone: EPOCH_INTERVAL_S, Evaluated: EPOCH_INTERVAL_S}
        self._changes: list[tuple[float, WorkerLost | GenerationStarted]] = []
        self._named_slow: set[int] = set()
        self._has_failed = False
        self._used: dict[int, ResourcesUsed] = {}
        self._slow: dict[int, Straggler] = {}
        super().__init__(stdout, stderr)

    def _shown_event(self, event: Event) -> None:
        match event:
            case StepDone():
                self._tally.add(event)
                self._release_changes()
            case CheckpointSaved() | Logged() | EpochDone() | Evaluated():
                self._hold(event)
            case Straggler():
                self._note_slow(event)
            case WorkerLost():
                self._changes.append((time.monotonic(), event))
            case ResourcesUsed():
                self._used[event.rank] = event  # told at the end of the run
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
            return  # the failure block has said it
        line = line_of(event, elapsed_s=None if self._began is None else now - self._began)
        if line is not None:
            self._line(line)
        if isinstance(event, RunStarted) and self._verbose:
            self._line(details_of(event))

    def _end(self, event: RunEnded, now: float) -> None:
        if self._has_failed or event.exit_code in STOPPED_CODES:
            self._changes.clear()  # workers that were asked to end are not lost
        self._held.pop(Straggler, None)
        self._before_result(now, last=True)
        if self._verbose:
            for text in used_lines(self._used.values()):
                self._line(f"used by {text}")
        for slow in self._slow.values():
            if not slow.is_over:
                self._line(f"since step {slow.step} {slow_line(slow)}")

    def _said(self, line: str) -> None:
        self._release_changes()
        super()._said(line)

    def _failed(self, block: str) -> None:
        self._changes.clear()
        self._held.pop(Straggler, None)
        self._has_failed = True
        self._before_result(time.monotonic(), last=True)
        super()._failed(block)

    def _forget_slow(self) -> None:
        """Ranks are others' now."""
        self._slow.clear()
        self._named_slow.clear()

    def _note_slow(self, event: Straggler) -> None:
        self._slow = {rank: one for rank, one in self._slow.items() if one.generation == event.generation}
        self._slow[event.rank] = event
        if event.is_over and event.rank not in self._named_slow:
            self._held.pop(Straggler, None)  # it was over before anything was said
        else:
            self._hold(event)

    def _hold(self, event: Event) -> None:
        self._held[type(event)] = event
        now = time.monotonic()
        if self._is_due(type(event), now):
            self._release(type(event), event, now)

    def _is_due(self, kind: type, now: float) -> bool:
        every_s = min(self._every_s.get(kind, self._interval_s), self._interval_s)
        return now - self._last_line.get(kind, -every_s) >= every_s

    def _tick(self, now: float) -> None:
        for kind, event in list(self._held.items()):
            if self._is_due(kind, now):
                self._release(kind, event, now)
        if self._changes and now - self._changes[0][0] >= CHANGE_HELD_S:
            self._release_changes()

    def _release(self, kind: type, event: Event, now: float) -> None:
        del self._held[kind]
        if isinstance(event, EpochDone):
            self._before_result(now, last=False)
        if isinstance(event, Straggler):
            (self._named_slow.discard if event.is_over else self._named_slow.add)(event.rank)
        self._last_line[kind] = now
        self._line(line_of(event) or "")

    def _release_results(self, now: float) -> None:
        """What came before another line stands before it."""
        for kind in (EpochDone, Evaluated):
            if kind in self._held:
                self._release(kind, self._held[kind], now)

    def _release_changes(self) -> None:
        changes, self._changes = self._changes, []
        for _, event in changes:
            if (line := line_of(event)) is not None:
                self._line(line)

    def _finish(self) -> None:
        self._before_result(time.monotonic(), last=True)

    def _before_result(self, now: float, *, last: bool) -> None:
        """Bring the record up to date before an epoch's result or the end."""
        if last:
            self._release_changes()
            for kind, event in list(self._held.items()):
                self._release(kind, event, now)


class _Plain(_Narrated):
    """For pipes and log files: whole lines, no colours, never a carriage return of ours."""

    def _tick(self, now: float) -> None:
        super()._tick(now)
        if now - self._last_line.get(StepDone, -self._interval_s) >= self._interval_s:
            self._steps_line(now)

    def _before_result(self, now: float, *, last: bool) -> None:
        super()._before_result(now, last=last)
        if last or now - self._last_line.get(StepDone, now) >= 1.0:  # short epochs: their results are lines enough
            self._steps_line(now)

    def _steps_line(self, now: float) -> None:
        if self._tally.fresh:
            self._last_line[StepDone] = now
            self._line(self._tally.line())
            self._tally.fresh = False
            self._tally.forget()


class _Live(_Narrated):
    """For terminals: two lines at the bottom, redrawn in place five times a second; the rest goes by above."""

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

    def _shown_event(self, event: Event) -> None:
        if isinstance(event, CheckpointSaved):
            self._note = f"saved step {event.step}"  # in the bar: the bar is always there, so no line is needed
        elif isinstance(event, LaunchStarted):
            self._launch, self._seen_generation = (event, time.monotonic()), False
        else:
            super()._shown_event(event)

    def _launched(self) -> None:
        """Something came from the workers, or of them: nobody waits for their start any more."""
        if self._launch is not None:
            self._launch = None
            self._bar.erase()

    def _pass_on(self, output: _Output) -> None:
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
            self._tally = Tally()  # no bar any more, unless another call trains on

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
    """A path as short as it can be written in this directory."""
    near = os.path.relpath(path)
    return path if near.startswith("..") else near


@contextlib.contextmanager
def _nothing_escapes() -> Iterator[None]:
    """A display that cannot show something shows the next thing; training never hears of it."""
    with contextlib.suppress(Exception):
        yield
