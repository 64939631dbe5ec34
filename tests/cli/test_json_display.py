"""The launcher's lines for programs."""

from __future__ import annotations

import io
import json
import os
import time

from manyhands.cli.json_display import JsonDisplay
from manyhands.events import GenerationStarted


def test_every_event_has_its_time():
    stream = io.StringIO()
    JsonDisplay(stream).event(GenerationStarted(generation="1.1", workers=2, hosts=1))
    assert abs(json.loads(stream.getvalue())["time_s"] - time.time()) < 60


def test_a_reader_that_goes_away_does_not_end_the_run():
    read_end, write_end = os.pipe()
    os.close(read_end)
    display = JsonDisplay(os.fdopen(write_end, "w", closefd=False))
    display.say("nobody hears this")
    display.say("nor this")
    display.close()
    os.close(write_end)
