"""A run of one worker without a launcher: `python train.py`.

`Solo` stands in for the line to an agent. It holds the run directory's lock, shows progress in this process, turns
the first SIGTERM, SIGUSR1 or Ctrl-C into a request to stop (the second one ends the process at once), and leaves
the run directory marked with how the script ended.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from manyhands.comm.segments import Segment
from manyhands.control.launch_request import Display
from manyhands.control.runs import RunDirectory, default_path, run_name
from manyhands.control.session import RunFacts, WorkerPosition
from manyhands.errors import ManyhandsError, UsageError
from manyhands.events import Event, RunEnded
from manyhands.runtime.launch import how_to_resume, open_display
from manyhands.runtime.recorder import Recorder
from manyhands.runtime.tracebacks import told
from manyhands.spec.load import Resolved, environment
from manyhands.spec.seat import Seat

__all__ = ["Solo", "watch_ending"]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Solo:
    """The only worker of a run, and its own launcher."""

    def __init__(self, resolved: Resolved) -> None:
        self.seat = Seat(
            agent="", rank=0, world_size=1, local_rank=0, local_world_size=1, generation="1.1", incarnation=1
        )
        self.group, self.newest = self.seat.group(), None
        self.stop_requested: str | None = None
        self.servers_wanted = 0
        self.recorder: Recorder | None = None
        self._resolved = resolved
        self._directory: RunDirectory | None = None
        self._display: Display | None = None
        self._step = 0
        self._checkpoint: str | None = None

    @property
    def run_dir(self) -> Path:
        assert self._directory is not None
        return self._directory.path

    def join(self, facts: RunFacts) -> None:
        path = Path(facts.run_dir) if facts.run_dir else default_path(run_name(facts.script))
        self._directory = RunDirectory.adopt(path, facts.overwrite, command=sys.argv)
        self._display = open_display(self._resolved, environment(), solo=True)
        _ending.solo = self
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                signal.signal(number, self._on_signal)

    def shared_memory(self, name: str, num_bytes: int, ranks: int = 0) -> Segment:
        raise AssertionError("a worker alone shares nothing")

    def report(self, step: int, phase: str, call: int = 0) -> None:
        self._step = step

    def committed(self, step: int, path: str) -> None:
        self._checkpoint = path

    def publish(self, event: Event) -> None:
        if self._display is not None:
            self._display.event(event)

    def positions(self, timeout_s: float = 1.0) -> dict[int, WorkerPosition]:
        return {}

    def close(self) -> None:
        pass  # the end of the process is the end of the run; see `end`

    def end(self, code: int, error: BaseException | None) -> None:
        """The script is over: say so, and leave the run directory marked."""
        dropped = self.recorder.dropped if self.recorder is not None else 0
        reason = "done" if code == 0 else f"{type(error).__name__}: {error}".splitlines()[0]
        ended = RunEnded(time_s=time.time(), exit_code=code, step=self._step, reason=reason, dropped=dropped)
        if self.recorder is not None:
            self.recorder.emit(ended)
            self.recorder.close(timeout_s=5.0)
        if self._display is not None:
            self._display.event(ended)
            self._display.close()
        if self._directory is not None:
            self._directory.mark("finished" if code == 0 else "stopped" if code in (75, 130, 143) else "failed", code)
            self._directory.release()

    def how_to_go_on(self) -> list[str]:
        if self._checkpoint is None:
            return []
        resume = how_to_resume(self._resolved, str(self.run_dir))
        return [f"  last checkpoint: {self._checkpoint}", f"  resume: {resume}"]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stop_requested:
            os._exit(128 + number)
        self.stop_requested = "preempt"
        if number == signal.SIGINT and not self._step:
            raise KeyboardInterrupt  # nothing is being trained: behave as any script would


class _Ending:
    """How a script that is its own launcher ends: errors a user can act on in a few lines, and our exit codes."""

    def __init__(self) -> None:
        self.solo: Solo | None = None
        self._error: BaseException | None = None
        self._previous_hook: Callable[..., None] | None = None
        self._exit = sys.exit

    def watch(self) -> None:
        if self._previous_hook is None:
            self._previous_hook = sys.excepthook
            sys.excepthook = self._on_uncaught
            sys.exit = self._on_exit  # Python tells nobody of a SystemExit, and a run that ends so is not finished
            atexit.register(self._at_exit)

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._error = error
        assert self._previous_hook is not None
        if isinstance(error, ManyhandsError) and error.exit_code not in (1, 70):
            if error.exit_code == UsageError.exit_code and error.where is None:
                error.where = _line_of_the_script(trace)
            print(f"{kind.__name__}: {error}", file=sys.stderr)
        elif self._previous_hook is sys.__excepthook__:
            print(told(error), end="", file=sys.stderr)
        else:
            self._previous_hook(kind, error, trace)
        if self.solo is not None:
            for line in self.solo.how_to_go_on():
                print(line, file=sys.stderr)

    def _on_exit(self, status: Any = None) -> NoReturn:
        self._error = SystemExit(status)
        self._exit(status)

    def _at_exit(self) -> None:
        code = _exit_code(self._error)
        if self.solo is not None:
            self.solo.end(code, self._error)
        if code not in (0, 1, 130) and isinstance(self._error, ManyhandsError):
            # Python ends with 1 after any uncaught exception; our exit codes say more than that.
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):  # the reader of a pipe may be gone
                    stream.flush()
            os._exit(code)


_ending = _Ending()
watch_ending = _ending.watch


def _line_of_the_script(trace: TracebackType | None) -> str | None:
    """Where the user's code made the call that was refused."""
    ours = str(Path(__file__).parents[1])
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(ours + os.sep)]
    return f"{os.path.relpath(frames[-1].filename)} line {frames[-1].lineno}" if frames else None


def _exit_code(error: BaseException | None) -> int:
    if error is None:
        return 0
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit):
        return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    return error.exit_code if isinstance(error, ManyhandsError) else 1
