"""The launcher's lines for programs."""

from __future__ import annotations

import io
import json
import os
import threading
import time

from manyhands.cli.common.json_display import JsonDisplay
from manyhands.events import GenerationStarted
from manyhands.observe import output_spool


def test_every_event_has_its_time():
    stream = io.StringIO()
    display = JsonDisplay(stream)
    display.event(GenerationStarted(generation="1.1", workers=2, hosts=1))
    display.close()
    assert abs(json.loads(stream.getvalue())["time_s"] - time.time()) < 60


def test_a_reader_that_goes_away_does_not_end_the_run():
    read_end, write_end = os.pipe()
    os.close(read_end)
    display = JsonDisplay(os.fdopen(write_end, "w", closefd=False))
    display.say("lost on a closed pipe")
    display.say("nor this")
    display.close()
    os.close(write_end)


def test_a_reader_that_pauses_holds_nothing_up_and_loses_no_line(monkeypatch):
    monkeypatch.setattr(output_spool, "MAX_IN_MEMORY_BYTES", 1000)
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w") as stream, os.fdopen(read_end) as reader:
        display = JsonDisplay(stream)
        for number in range(2000):  # far more than a pipe holds, and no process reads yet
            display.say(f"line {number} " + "x" * 100)
        read = []
        reading = threading.Thread(target=lambda: read.extend(json.loads(next(reader)) for _ in range(2000)))
        reading.start()
        display.close()
        reading.join()
    assert [one["line"].split()[1] for one in read] == [str(number) for number in range(2000)]
