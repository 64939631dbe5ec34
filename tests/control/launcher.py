"""A launcher for tests: reads one LaunchRequest as JSON, runs it, and writes down what it was shown.

Arguments: the request's file, and a file for lines of JSON, one per call of the display.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path

import msgspec

from manyhands.control.agent.agent import run_agent
from manyhands.control.messages.failure import Failure, render
from manyhands.control.messages.launch_request import LaunchRequest
from manyhands.errors import ManyhandsError
from manyhands.events import Event, encode


class Notes:
    def __init__(self, path: str) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115

    def _note(self, **what: object) -> None:
        self._file.write(json.dumps(what) + "\n")

    def event(self, event: Event) -> None:
        self._note(kind="event", event=json.loads(encode(event)))

    def output(self, rank: int, stream: str, data: bytes) -> None:
        os.write(1 if stream == "stdout" else 2, data)

    def say(self, line: str) -> None:
        self._note(kind="say", line=line)

    def failure(self, block: Failure) -> None:
        self._note(kind="failure", block=msgspec.to_builtins(block), text=render(block))

    def close(self) -> None:
        self._file.close()


def main() -> int:
    raw = json.loads(Path(sys.argv[1]).read_text())
    if raw.get("key"):
        raw["key"] = base64.b64decode(raw["key"])
    request = msgspec.convert({**raw, "environment": dict(os.environ)}, LaunchRequest)
    try:
        return run_agent(request, Notes(sys.argv[2]))
    except ManyhandsError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
