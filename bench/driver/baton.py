"""The driver of a comparison: sides that cannot share a process run in turn, one at a time, in one run.

A side is one or more processes with one or more ranks; each rank connects to the socket made here (see `turns`). Only
the side that the driver has sent a number of steps runs; the others block in a read, which costs nothing. Start reading
at `interleave`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from bench.driver.child import ROOT, ScriptFailed
from bench.driver.turns import ADDRESS_VARIABLE, SIDE_VARIABLE

__all__ = ["Baton", "Process", "Side", "interleave", "rotated", "steps_per_block", "taking_turns"]

START_S, BLOCK_S, END_S = 180.0, 600.0, 20.0
WARM_UP_STEPS = 12
MIN_STEPS, MAX_STEPS = 4, 2000


Watch = Callable[[list[int]], None]
"""Called with the ids of the processes of the side that is running."""


class Process(NamedTuple):
    command: Sequence[str]
    environment: Mapping[str, str]
    after: Path | None = None
    """Started once this file exists."""


class Side(NamedTuple):
    name: str
    num_ranks: int
    processes: Callable[[str], Sequence[Process]]
    """Called with a folder for the side's files, which is removed afterwards."""


class _Rank:
    """The driver's view of one rank."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._lines = connection.makefile("r")
        self.facts = self.read()

    def read(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            raise ScriptFailed("a rank hung up")
        found: dict[str, Any] = json.loads(line)
        return found

    def send(self, steps: int) -> None:
        self.socket.sendall(json.dumps({"run": steps}).encode() + b"\n")

    def close(self) -> None:
        self._lines.close()
        self.socket.close()


class Baton:
    """Sides that have started and wait for their turn."""

    def __init__(self, watch: Watch | None) -> None:
        self._watch = watch
        self._ranks: dict[str, list[_Rank]] = {}
        self._started: dict[str, list[subprocess.Popen[bytes]]] = {}

    def run(self, side: str, steps: int) -> float:
        """Let a side run; returns seconds per step, averaged over its ranks."""
        ranks = self._ranks[side]
        for rank in ranks:
            rank.send(steps)
        deadline = time.monotonic() + BLOCK_S
        waiting = {rank.socket: rank for rank in ranks}
        seconds = []
        while waiting:
            ready = wait(list(waiting), 0.05 if self._watch else 1.0)
            seconds += [float(waiting.pop(end).read()["seconds"]) for end in ready]
            if self._watch:
                self._watch(self.pids(side))
            if time.monotonic() > deadline:
                raise ScriptFailed(f"{side} did not finish {steps} steps in {BLOCK_S:g} s")
        return fmean(seconds)

    def facts(self, side: str) -> dict[str, Any]:
        """The facts that rank 0 of a side reported, such as versions and threads."""
        known = self._ranks[side][0].facts
        return {name: value for name, value in known.items() if name not in ("side", "rank")}

    def pids(self, side: str) -> list[int]:
        return [process.pid for process in self._started[side]]

    def _start(self, side: Side, listener: socket.socket, folder: Path) -> None:
        """Start one side after the other, so that none waits for a peer longer than necessary."""
        folder.mkdir()
        deadline = time.monotonic() + START_S
        started = self._started[side.name] = []
        variables = {ADDRESS_VARIABLE: listener.getsockname(), SIDE_VARIABLE: side.name, "PYTHONPATH": str(ROOT)}
        for process in side.processes(str(folder)):
            while process.after is not None and not process.after.exists():
                self._check(side.name, deadline)
                time.sleep(0.05)
            with open(folder / "output", "ab") as output:
                started.append(
                    subprocess.Popen(
                        process.command,
                        cwd=ROOT,
                        env={**process.environment, **variables},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                )
        ranks: list[_Rank] = []
        while len(ranks) < side.num_ranks:
            self._check(side.name, deadline)
            if wait([listener], 0.2):
                ranks.append(_Rank(listener.accept()[0]))
        self._ranks[side.name] = sorted(ranks, key=lambda rank: int(rank.facts["rank"]))

    def _check(self, side: str, deadline: float) -> None:
        if self._watch:
            self._watch(self.pids(side))
        if any(process.poll() is not None for process in self._started[side]):
            raise ScriptFailed(f"{side} ended before its first step")
        if time.monotonic() > deadline:
            raise ScriptFailed(f"{side} was not up after {START_S:g} s")

    def _end(self) -> None:
        """Ask every rank to end; kill the processes that do not."""
        for rank in self._all_ranks():
            with contextlib.suppress(OSError):
                rank.send(0)
        deadline = time.monotonic() + END_S
        for process in (process for started in self._started.values() for process in started):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        self._kill()

    def _kill(self) -> None:
        for process in (process for started in self._started.values() for process in started):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # workers of a killed `mh run` end with it
                process.wait()
        for rank in self._all_ranks():
            rank.close()

    def _all_ranks(self) -> list[_Rank]:
        return [rank for ranks in self._ranks.values() for rank in ranks]


@contextlib.contextmanager
def taking_turns(sides: Sequence[Side], watch: Watch | None = None) -> Iterator[Baton]:
    """All sides started, none running. On any failure, the `ScriptFailed` contains the output of the sides.

    `watch` is called many times a second while a side starts or runs; an exception from it ends all sides at once.
    """
    with tempfile.TemporaryDirectory(prefix="manyhands-bench-") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/baton")
        listener.listen(64)
        baton = Baton(watch)
        try:
            for i, side in enumerate(sides):
                baton._start(side, listener, Path(folder, str(i)))
            yield baton
            baton._end()
        except (ScriptFailed, OSError) as error:
            baton._kill()
            raise ScriptFailed(f"{error}\n{_outputs(Path(folder))}") from error
        finally:
            baton._kill()


def interleave(sides: Sequence[Side], num_blocks: int, block_s: float) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Seconds per step of each block, by side, and the facts of the sides. The fastest side sets the block length."""
    names = [side.name for side in sides]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with taking_turns(sides) as baton:
        steps = steps_per_block(min(baton.run(name, WARM_UP_STEPS) for name in names), block_s)
        for turn in range(num_blocks):
            for name in rotated(names, turn):
                seconds[name].append(baton.run(name, steps))
        facts = {name: baton.facts(name) for name in names}
    return seconds, {"steps_per_block": steps, "of_sides": facts}


def steps_per_block(step_s: float, block_s: float, most: int = MAX_STEPS) -> int:
    return max(MIN_STEPS, min(most, round(block_s / step_s)))


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The order of a round: each side is first in turn."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def _outputs(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(folder.glob("*/output")))
