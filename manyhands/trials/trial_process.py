"""The launcher of one trial, in a process of its own: what `mh run` would do, told to the parent as JSON lines.

Started by `trial_runner` as `python -m manyhands.trials.trial_process`, with an `Order` on its standard input. Ends
with its parent, and everything it started ends with it.
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

__all__ = ["Failed", "Order", "Wrote", "main"]


class Order(msgspec.Struct, kw_only=True):
    command: WorkerCommand
    run_dir: str
    parent: int
    flags: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    """What the script's constructor said, where it is known."""
    config_file: str | None = None


class Failed(msgspec.Struct, tag_field="event", tag=True):
    """Why there is nothing to measure: in a line, and in full."""

    reason: str
    details: str
    error: str = ""
    """The class of ours that was raised before any worker ran."""


class Wrote(msgspec.Struct, tag_field="event", tag=True):
    """What the chief wrote to its standard error."""

    text: str


class _Telling:
    """A display that passes on what a trial is about."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def event(self, event: Event) -> None:
        if isinstance(event, RunStarted | StepDone | RunEnded):
            self._line(encode(event))

    def output(self, rank: int, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        if stream == "stderr":
            self.tell(Wrote(data.decode(errors="replace")))

    def say(self, line: str) -> None:
        pass  # how to resume it, and the like

    def failure(self, block: Failure) -> None:
        self.tell(Failed(describe(block.first), render(block)))

    def close(self) -> None:
        pass  # every line is out

    def tell(self, told: Failed | Wrote) -> None:
        self._line(msgspec.json.encode(told))

    def _line(self, line: bytes) -> None:
        with suppress(OSError):  # the parent has heard enough, and will end us in a moment
            os.write(self._fd, line + b"\n")


def main() -> None:
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    die_with_parent(order.parent)
    display = _Telling(sys.stdout.fileno())
    try:
        code = _run(order, display, environment())
    except ManyhandsError as error:
        display.tell(Failed(error.what, str(error), type(error).__name__))
        code = error.exit_code
    sys.exit(code)


def _run(order: Order, display: _Telling, environ: Mapping[str, str]) -> int:
    resolved = resolve(flags=order.flags, arguments=order.arguments, environ=environ, config_file=order.config_file)
    request = make_request(resolved, order.command, place(resolved, environ), environ, run_dir=order.run_dir)
    return run_agent(request, display)


if __name__ == "__main__":
    main()
