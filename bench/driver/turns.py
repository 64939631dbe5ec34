"""The client of the driver in `baton`: sides in separate processes take turns, so that their blocks interleave.

Every rank of every side connects to the driver's socket, identifies itself, and then runs steps on request: it receives
a line {"run": 20} and replies with a line {"seconds": 0.151} per step; {"run": 0} is the end. A socket and not standard
input, because workers of `mh run` have none. Standard library only: peers' environments load this file.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from time import perf_counter
from typing import Any

__all__ = ["ADDRESS_VARIABLE", "SETTLING_STEPS", "SIDE_VARIABLE", "TurnHook", "Turns", "take_turns"]

# Steps at the start of every block that are not measured: caches hold the other side's weights, and our data was
# prefetched while the others ran.
SETTLING_STEPS = 4
ADDRESS_VARIABLE, SIDE_VARIABLE = "BENCH_BATON", "BENCH_SIDE"


class Turns:
    """This rank's connection to the driver. `facts` are for the report: versions, threads."""

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
    """For a side that runs a given number of steps on request."""
    while steps := turns.wait():
        run(SETTLING_STEPS)
        started = perf_counter()
        run(steps)
        turns.done((perf_counter() - started) / steps)


class TurnHook:
    """For the trainer, which has its own loop: a hook that blocks until this side's turn, and finally ends `fit`.

    Where every update is from one worker, a step of the other sides, with a batch of each worker, is several updates.
    """

    def __init__(self, connect: Callable[[], Turns], updates_per_step: int = 1) -> None:
        self._connect, self._each = connect, updates_per_step
        self._turns: Turns | None = None
        self._step, self._steps, self._started = 0, 0, 0.0

    def after_step(self, trainer: Any, step: int, stats: Any) -> None:
        if self._turns is None:  # after the first step: the driver takes a connected rank to have started
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
            # The ranks agree on it in their next step, which is not measured.
            trainer.request_stop()
