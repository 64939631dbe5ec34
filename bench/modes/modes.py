"""`python -m bench modes`: every mode of `mh demo` on three networks, and on a link of 100 Mbit/s between two hosts.

Speed: all modes take turns in blocks. The rest: whole runs, as many as there are launches; medians. After equal time
means: as many steps as the mode does in the time in which one process does `STEPS`. Start reading at `measure`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from bench.driver.baton import Process, Side, rotated, steps_per_block, taking_turns
from bench.driver.child import ScriptFailed
from bench.driver.sides import MH, plain_environment
from bench.hosts.hosts import Hosts, run_on, two_hosts, why_not
from bench.modes.mode_runs import Kill, Reached, killed, reached
from bench.modes.networks import BATCH
from manyhands.control.processes.template_process import shared_template
from manyhands.launcher.launch import default_environment
from manyhands.recipes.every_mode import MODES, Mode

__all__ = ["LINK", "STEPS", "measure"]

STEPS, MOST_STEPS = 120, 480
WARM_UP_STEPS = 12
LINK, LINK_NETWORK = "100mbit", "wide"
ON_LINK = tuple(mode for mode in MODES if mode.name not in ("single", "central_storage"))
"""Not one process, which sends nothing, and not one copy of the weights in one host's memory."""
T = TypeVar("T")


def measure(networks: Sequence[str], blocks: int, block_s: float, launches: int) -> dict[str, Any]:
    """By network, and "link": the rows of the tables, one for each mode."""
    found: dict[str, Any] = {}
    with shared_template(default_environment(threads=1)):
        for network in networks:
            if network != "link":
                found[network] = _network(network, blocks, block_s, launches)
    if "link" in networks:
        reason = why_not()
        found["link"] = {"skipped": reason} if reason else _on_link(blocks, block_s)
    return found


def _network(network: str, blocks: int, block_s: float, launches: int) -> list[dict[str, Any]]:
    _say(f"modes: {network}: speed ...")
    seconds = _turns([_side(mode, network) for mode in MODES], blocks, block_s)
    rows = []
    with tempfile.TemporaryDirectory(prefix="manyhands-bench-") as folder:
        for mode in MODES:
            _say(f"modes: {network}: {mode.name} ...")
            row: dict[str, Any] = {"mode": mode.name, "workers": mode.workers, "servers": mode.servers}
            row["rows_per_s"] = BATCH / median(seconds[mode.name])
            ratio = median(seconds["single"]) / median(seconds[mode.name])
            equal_time = max(2, min(MOST_STEPS, round(STEPS * ratio)))
            try:
                row |= _whole_runs(mode, network, equal_time, launches, Path(folder))
            except ScriptFailed as error:
                row["failed"] = str(error).splitlines()[0]
            _say(f"modes: {network}: {json.dumps(row)}")  # kept if it is interrupted
            rows.append(row)
    return rows


def _whole_runs(mode: Mode, network: str, equal_time: int, launches: int, folder: Path) -> dict[str, Any]:
    def several(what: str, run: Callable[[Path], T]) -> list[T]:
        return [run(folder / f"{mode.name}-{what}-{number}") for number in range(launches)]

    ends: list[Reached] = several("steps", lambda at: reached(mode, network, STEPS, at))
    timed = ends if equal_time == STEPS else several("time", lambda at: reached(mode, network, equal_time, at))
    kills: list[Kill] = several("kill", lambda at: killed(mode, network, STEPS, at))
    late = [end.staleness for end in ends if end.staleness is not None]
    return {
        "memory_bytes": median(end.memory_bytes for end in ends),
        "bytes_per_step": median(end.bytes_per_step for end in ends),
        "staleness": median(late) if late else None,
        "loss_after_steps": median(end.loss for end in ends),
        "steps": STEPS,
        "loss_after_time": median(end.loss for end in timed),
        "steps_in_time": equal_time,
        "kill_s": median(kill.seconds for kill in kills),
        "kill_steps_lost": median(kill.steps_lost for kill in kills),
    }


def _turns(sides: Sequence[Side], blocks: int, block_s: float) -> dict[str, list[float]]:
    """Seconds per step of each block. Unlike `interleave`, a slow side has fewer steps in a block."""
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    with taking_turns(sides) as baton:
        steps = {name: steps_per_block(baton.run(name, WARM_UP_STEPS), block_s) for name in seconds}
        for turn in range(blocks):
            for name in rotated(list(seconds), turn):
                seconds[name].append(baton.run(name, steps[name]))
    return seconds


def _side(mode: Mode, network: str) -> Side:
    def processes(folder: str) -> list[Process]:
        servers = ("--servers", str(mode.servers)) if mode.servers else ()
        run = ("run", "-n", str(mode.workers), *servers, "--threads", "1", "--ui", "none", "--run-dir", f"{folder}/run")
        return [Process([*MH, *run, *_program(mode, network)], plain_environment(allocator=False))]

    return Side(mode.name, mode.workers, processes)


def _program(mode: Mode, network: str) -> tuple[str, ...]:
    return ("-m", "bench.modes.mode_program", network, mode.name, "turns")


def _on_link(blocks: int, block_s: float) -> list[dict[str, Any]]:
    """One mode after the other, each on new hosts: they have one link, whose bytes are counted."""
    rows = []
    for mode in ON_LINK:
        try:
            with two_hosts(LINK) as hosts:
                rows.append({"mode": mode.name, **_one_on_link(hosts, mode, blocks, block_s)})
        except ScriptFailed as error:
            rows.append({"mode": mode.name, "failed": str(error).splitlines()[0]})
        _say(f"modes: link: {json.dumps(rows[-1])}")
    return rows


def _one_on_link(hosts: Hosts, mode: Mode, blocks: int, block_s: float) -> dict[str, Any]:
    each = mode.workers // 2
    servers = ("--servers", str(mode.servers)) if mode.servers else ()
    program = _program(mode, LINK_NETWORK)
    side = Side(mode.name, mode.workers, lambda folder: run_on(hosts, folder, servers, program, each))
    with taking_turns([side]) as baton:
        steps = steps_per_block(baton.run(mode.name, WARM_UP_STEPS), block_s)
        steps += -steps % 8  # whole averaging rounds
        seconds, sent = [], []
        for _ in range(blocks):
            before = _bytes_on(hosts)
            seconds.append(baton.run(mode.name, steps))
            sent.append((_bytes_on(hosts) - before) / steps)
    return {"rows_per_s": BATCH / median(seconds), "link_bytes_per_step": median(sent)}


def _bytes_on(hosts: Hosts) -> int:
    """What both ends of the link have sent."""
    total = 0
    for prefix, link in zip(hosts.prefixes, hosts.links, strict=True):
        counter = f"/sys/class/net/{link}/statistics/tx_bytes"
        total += int(subprocess.run([*prefix, "cat", counter], capture_output=True, check=True).stdout)
    return total


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
