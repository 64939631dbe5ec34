"""A side's end of the baton: sides in processes of their own take turns, so that their blocks interleave in one run.

Every rank of every side connects to the driver's socket (see `baton`), says who it is, and then runs steps when it is
told to: a line {"run": 20} comes, a line {"seconds": 0.151} per step goes back; {"run": 0} is the end. A socket and
not standard input, because workers of `mh run` have none. Standard library only: peers' environments load this file.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from time import perf_counter
from typing import Any

__all__ = ["ADDRESS_VARIABLE", "SETTLING_STEPS", "SIDE_VARIABLE", "TurnHook", "Turns", "take_turns"]

# Steps at the start of every block that do not count: caches hold the other side's weights, and our data has been
# read ahead while the others ran.
SETTLING_STEPS = 4
ADDRESS_VARIABLE, SIDE_VARIABLE = "BENCH_BATON", "BENCH_SIDE"


class Turns:
    """This rank's place in the round. `facts` are for the report: versions, threads."""

    def __init__(self, **facts: Any) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ[ADDRESS_VARIABLE])
        self._lines = self._socket.makefile("r")
        self._send({"side": os.environ[SIDE_VARIABLE], "rank": int(os.environ["RANK"]), **facts})

    def wait(self) -> int:
        """How many steps to run now; 0 for no more."""
        line = self._lines.readline()
        return int(json.loads(line)["run"]) if line else 0

    def done(self, seconds_per_step: float) -> None:
        self._send({"seconds": seconds_per_step})

    def _send(self, what: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(what).encode() + b"\n")


def take_turns(turns: Turns, run: Callable[[int], None]) -> None:
    """For a side that runs so many steps when told to."""
    while steps := turns.wait():
        run(SETTLING_STEPS)
        started = perf_counter()
        run(steps)
        turns.done((perf_counter() - started) / steps)


class TurnHook:
    """For the trainer, which runs steps by itself: a hook that holds it until its turn, and ends `fit` at the end.

    Where every update is one worker's, a step of the others, in which each worker takes its batch, is several updates.
    """

    def __init__(self, connect: Callable[[], Turns], updates_per_step: int = 1) -> None:
        self._connect, self._each = connect, updates_per_step
        self._turns: Turns | None = None
        self._step, self._steps, self._started = 0, 0, 0.0

    def after_step(self, trainer: Any, step: int, stats: Any) -> None:
        if self._turns is None:  # after the first step: the driver takes those who connect to be up
            self._turns = self._connect()
            return self._wait(trainer)
        self._step += 1
        if self._step == self._each * SETTLING_STEPS:
            self._started = perf_counter()
        if self._step == self._each * (SETTLING_STEPS + self._steps):
            self._turns.done((perf_counter() - self._started) / self._steps)
            self._wait(trainer)

    def _wait(self, trainer: Any) -> None:
        assert self._turns is not None
        self._step, self._steps = 0, self._turns.wait()
        if self._steps == 0:
            # The ranks agree on it with their next step, which no longer counts.
            trainer.request_stop()
