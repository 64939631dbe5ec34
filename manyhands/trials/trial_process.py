"""The launcher of one trial, in a separate process: runs it as `mh run` would, and reports to its parent in JSON lines.

Started by `trial_runner` as `python -m manyhands.trials.trial_process`, with a `TrialRequest` on its standard input.
Ends with its parent, and everything it started ends with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

import msgspec

from manyhands.control.agent.agent import run_agent
from manyhands.control.messages.failure import Failure, describe, render
from manyhands.control.messages.launch_request import WorkerCommand
from manyhands.control.processes.fence import die_with_parent
from manyhands.errors import ManyhandsError
from manyhands.events import Event, RunEnded, RunStarted, StepDone, encode
from manyhands.launcher.launch import make_request, place
from manyhands.spec.load import environment, resolve

__all__ = ["Failed", "TrialRequest", "Wrote", "main"]


class TrialRequest(msgspec.Struct, kw_only=True):
    command: WorkerCommand
    flags: dict[str, Any] = {}
    """Settings by dotted key."""
    arguments: dict[str, Any] = {}
    """The script's constructor arguments, where they are known."""
    config_file: str | None = None
    run_dir: str = ""
    """With `parent`, set by `trial_runner.run_trial`."""
    parent: int = 0


class Failed(msgspec.Struct, tag_field="event", tag=True):
    """Why there is nothing to measure: in one line, and in full."""

    reason: str
    details: str
    error: str = ""
    """Name of the manyhands error that was raised before any worker ran."""


class Wrote(msgspec.Struct, tag_field="event", tag=True):
    """Output of the chief on standard error."""

    text: str


class _ReportingDisplay:
    """A display that sends the parent the events that a trial needs."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def event(self, event: Event) -> None:
        if isinstance(event, RunStarted | StepDone | RunEnded):
            self._line(encode(event))

    def output(self, rank: int, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        if stream == "stderr":
            self.report(Wrote(data.decode(errors="replace")))

    def say(self, line: str) -> None:
        pass  # not needed: how to resume the run, and the like

    def failure(self, block: Failure) -> None:
        # Its run directory is deleted with the trial, so its name, its log and how to resume it are of no use.
        first = msgspec.structs.replace(block.first, log="")
        shown = msgspec.structs.replace(block, run="in a trial", first=first, committed_path="", resume="")
        self.report(Failed(describe(first), render(shown)))

    def close(self) -> None:
        pass  # every line is written already

    def report(self, message: Failed | Wrote) -> None:
        self._line(msgspec.json.encode(message))

    def _line(self, line: bytes) -> None:
        with suppress(OSError):  # the parent stopped reading, and will end this process in a moment
            os.write(self._fd, line + b"\n")


def main() -> None:
    trial = msgspec.json.decode(sys.stdin.buffer.read(), type=TrialRequest)
    die_with_parent(trial.parent)
    display = _ReportingDisplay(sys.stdout.fileno())
    try:
        code = _run(trial, display, environment())
    except ManyhandsError as error:
        display.report(Failed(error.what, str(error), type(error).__name__))
        code = error.exit_code
    sys.exit(code)


def _run(trial: TrialRequest, display: _ReportingDisplay, environ: Mapping[str, str]) -> int:
    resolved = resolve(flags=trial.flags, arguments=trial.arguments, environ=environ, config_file=trial.config_file)
    request = make_request(resolved, trial.command, place(resolved, environ), environ, run_dir=trial.run_dir)
    return run_agent(request, display)


if __name__ == "__main__":
    main()
