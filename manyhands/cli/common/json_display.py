"""Chooses the display of a launch: the usual one, or with --json one object per line, with its kind under "event"."""

from __future__ import annotations

import codecs
import json
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal, TextIO

import msgspec

from manyhands.control.messages.failure import Failure
from manyhands.control.messages.launch_request import Display
from manyhands.events import Event, encode
from manyhands.launcher.launch import open_display
from manyhands.observe.output_spool import Passage
from manyhands.observe.terminal import write_bytes
from manyhands.spec.load import Resolved

__all__ = ["JsonDisplay", "display_for"]


def display_for(resolved: Resolved, environ: Mapping[str, str], *, as_json: bool) -> Display:
    return JsonDisplay(sys.stdout) if as_json else open_display(resolved, environ)


class JsonDisplay:
    """Prints events unchanged, and Output, Said and Failure objects among them."""

    def __init__(self, stream: TextIO) -> None:
        self._passage = Passage(lambda line: write_bytes(stream, line), "manyhands-json")
        # The bytes of a character may arrive in two chunks.
        self._decoders: dict[tuple[int, str], codecs.IncrementalDecoder] = {}

    def event(self, event: Event) -> None:
        self._line(encode(msgspec.structs.replace(event, time_s=event.time_s or time.time())).decode())

    def output(self, rank: int, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        make = codecs.getincrementaldecoder("utf-8")
        decoder = self._decoders.setdefault((rank, stream), make(errors="replace"))
        if text := decoder.decode(data):
            self._object({"event": "Output", "rank": rank, "stream": stream, "text": text})

    def say(self, line: str) -> None:
        self._object({"event": "Said", "line": line})

    def failure(self, block: Failure) -> None:
        self._object({"event": "Failure", **msgspec.to_builtins(block)})

    def close(self) -> None:
        """Wait until the reader has everything: it may have paused, and training did not wait for it."""
        self._passage.close()
        if lost := self._passage.dropped_bytes:
            text = f"warning: {lost} bytes of --json output were dropped: the reader paused, and the disk is full"
            print(text, file=sys.stderr)

    def _object(self, value: dict[str, Any]) -> None:
        self._line(json.dumps(value))

    def _line(self, text: str) -> None:
        self._passage.put(text.encode(errors="replace") + b"\n")  # a closed reader does not stop the run
