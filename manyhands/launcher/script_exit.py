"""How a script without a launcher ends: actionable errors in a few lines, and our exit codes.

Active from the first use of a public name, so that invalid settings are reported as by `mh run`. Until one of our
errors is uncaught the script behaves as usual; errors that do not involve manyhands are reported by Python as usual.
Start reading at `ScriptEnd.watch`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, Protocol

from manyhands.errors import ManyhandsError, UsageError
from manyhands.launcher.worker_process.error_hints import hint_for
from manyhands.launcher.worker_process.user_tracebacks import OURS, format_error, involves_manyhands

__all__ = ["ending", "watch_ending"]


class OwnRun(Protocol):
    """A run that ends with the script."""

    def end(self, code: int, error: BaseException | None) -> None: ...

    def resume_lines(self) -> list[str]: ...


class ScriptEnd:
    def __init__(self) -> None:
        self._runs: list[OwnRun] = []
        self._error: BaseException | None = None
        self._previous_hook: Callable[..., None] | None = None
        self._last_lines: list[str] = []
        self._exit = sys.exit

    def watch(self) -> None:
        """Make our uncaught errors end the script with their exit code, and without a traceback."""
        if self._previous_hook is None:
            self._previous_hook = sys.excepthook
            sys.excepthook = self._on_uncaught
            atexit.register(self._at_exit)

    def add_run(self, run: OwnRun) -> None:
        """Call `run.end` when the script ends."""
        self.watch()
        self._runs.append(run)
        sys.exit = self._on_exit  # Python calls no hook for a SystemExit, and a run that ends so is not finished

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._error = error
        assert self._previous_hook is not None
        if isinstance(error, ManyhandsError) and error.exit_code not in (1, 70):
            if error.exit_code == UsageError.exit_code:
                error.where = _where(error.where, trace)
            print(f"{kind.__name__}: {error}", file=sys.stderr)
        elif self._previous_hook is sys.__excepthook__ and (involves_manyhands(error) or hint_for(error)):
            print(format_error(error), end="", file=sys.stderr)
        else:
            self._previous_hook(kind, error, trace)
        self._last_lines = [line for run in self._runs for line in run.resume_lines()]

    def _on_exit(self, status: Any = None) -> NoReturn:
        self._error = SystemExit(status)
        self._exit(status)

    def _at_exit(self) -> None:
        code = _exit_code(self._error)
        for run in self._runs:
            run.end(code, self._error)
        for line in self._last_lines:  # where a reader looks first
            print(line, file=sys.stderr)
        if code not in (0, 1, 130) and isinstance(self._error, ManyhandsError):
            # Python exits with 1 after any uncaught exception; our exit codes are more specific.
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):  # the reader of a pipe may be gone
                    stream.flush()
            os._exit(code)


ending = ScriptEnd()
watch_ending = ending.watch


def _where(given: str | None, trace: TracebackType | None) -> str | None:
    """The line of the script that made the call, unless `given` names another origin, such as a file or a flag."""
    # An import inside the script raises through Python's importer.
    frames = [one for one in traceback.extract_tb(trace) if not one.filename.startswith((OURS, "<frozen importlib"))]
    line = f"{os.path.relpath(frames[-1].filename)} line {frames[-1].lineno}" if frames else None
    if given in (None, "constructor"):
        return line or given
    return f"{line}, {given}" if line and given.startswith("mh.") else given


def _exit_code(error: BaseException | None) -> int:
    if error is None:
        return 0
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit):
        return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    return error.exit_code if isinstance(error, ManyhandsError) else 1
