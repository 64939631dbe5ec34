"""How soon an elastic run recovers: kills, stops, deadlocks and joins against real runs of four local workers.

Recovery is from the moment before the signal to the first step that any worker commits in a later generation; a step in
flight that the others finish without a new generation does not count. Each fault waits until all four are in the run
again. `--blocks 15`, the default, means the full numbers below; fewer blocks mean fewer faults.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from bench.driver.baton import interleave
from bench.driver.child import ROOT, ScriptFailed
from bench.driver.sides import MH, plain_environment, trainer
from bench.programs.workloads import WORKLOADS
from bench.recovery.commits import Commit, commits_between, first_in_later, read_commits, stall
from bench.recovery.recovery_script import BATCH, MODEL, THINK_S
from bench.results.compare import Measured, Size, divide
from bench.results.table import OURS
from manyhands.control.messages.status_messages import MemberStatus, Status
from manyhands.control.session.run_client import query
from manyhands.errors import UsageError
from manyhands.launcher.worker_process.hang_on_signal import HANG_SIGNAL

__all__ = ["Struck", "measure", "striking"]

WORKERS = 4
FULL_BLOCKS = 15
KILLS, HALTS, RESTARTS = 50, 8, 4
EVERY_S = 15.0
READY_S, RECOVER_S = 120.0, 60.0
SETTLED_STEPS = 5
POLL_S = 0.02
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "hang": HANG_SIGNAL}


def measure(workload: str, size: Size) -> Measured:
    match workload:
        case "kills":
            found: dict[str, list[float]] = _kills(_share(KILLS, size))
        case "stop" | "hang":
            found = _halts(workload, _share(HALTS, size))
        case "goodput":
            found = _goodput(_share(4, size))
        case "elastic" | "elastic-quick" | "exact":
            return _cost(workload, size)
        case _:
            raise ValueError(workload)
    return Measured([found], _settings())


def _share(full: int, size: Size) -> int:
    return max(1, round(full * size.num_blocks / FULL_BLOCKS))


def _settings() -> dict[str, Any]:
    return {"model": WORKLOADS[MODEL].model, "batch": BATCH, "workers": WORKERS, "threads": 1, "think_s": THINK_S}


# ---- costs without faults: sides that take turns ----


def _cost(what: str, size: Size) -> Measured:
    """The elastic run against the static one, or exact=True against the default; without any fault.

    In steps of about 50 ms, or quick ones of a fifth of that, where both cores compute all the time.
    """
    flags = ("--exact",) if what == "exact" else ("--elastic", f"1:{WORKERS}")
    plain = "default" if what == "exact" else "static"
    think_s = THINK_S if what == "elastic" else 0.0
    sides = [
        trainer(MODEL, WORKERS, flags=flags, think_s=think_s),
        *(trainer(MODEL, WORKERS, name=n, think_s=think_s) for n in (plain, f"{plain} again")),
    ]
    found = [interleave(sides, blocks, size.block_s) for blocks in divide(size)]
    settings = {**_settings(), "think_s": think_s, "batch": WORKLOADS[MODEL].batch * WORKERS}
    return Measured([seconds for seconds, _ in found], settings)


# ---- strikes ----


class Struck:
    """A live run of `recovery_script`, and the commits that its workers have logged."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process, self._folder = process, folder
        self.run_dir = folder / "run"

    def commits(self) -> list[Commit]:
        return read_commits(self._folder)

    def settled(self) -> Status:
        """Wait until all workers are in one generation and have committed some steps in it; returns the status."""

        def all_in() -> Status | None:
            status = self._status()
            if status is None or status.generation is None:
                return None
            members = [one for one in status.members if one.rank >= 0 and one.generation == status.generation]
            newest = _generation(status)
            steps = {commit.step for commit in self.commits() if commit.generation == newest}
            return status if len(members) == WORKERS and len(steps) >= SETTLED_STEPS else None

        return self.until(all_in, READY_S, "group of four workers")

    def strike(self, kind: str, victim: MemberStatus, status: Status) -> float:
        """Inject a fault and wait; returns the seconds until the first commit of a later generation."""
        began = time.monotonic()
        os.kill(victim.pid, SIGNALS[kind])
        later = self.until(lambda: first_in_later(self.commits(), _generation(status)), RECOVER_S, f"step after {kind}")
        return later.at_s - began

    def _status(self) -> Status | None:
        try:
            return query(self.run_dir)
        except (UsageError, OSError):
            return None

    def until(self, found: Callable[[], Any], timeout_s: float, what: str) -> Any:
        deadline = time.monotonic() + timeout_s
        while (value := found()) is None:
            if self.process.poll() is not None:
                raise ScriptFailed(f"the run ended with {self.process.returncode}, before there was a {what}")
            if time.monotonic() > deadline:
                raise ScriptFailed(f"no {what} within {timeout_s:g} s")
            time.sleep(POLL_S)
        return value


def _generation(status: Status) -> tuple[int, ...]:
    assert status.generation is not None
    return tuple(map(int, status.generation.split(".")))


@contextmanager
def striking(
    script: str = "bench.recovery.recovery_script", *words: str, flags: tuple[str, ...] = ()
) -> Iterator[Struck]:
    """A run that lasts until the `with` block ends; its files are removed."""
    with tempfile.TemporaryDirectory(prefix="manyhands-bench-") as name:
        folder = Path(name)
        run = ("run", "-n", str(WORKERS), "--elastic", f"1:{WORKERS}", "--threads", "1", "--ui", "none")
        more = ("--max-restarts", "10000", "--run-dir", str(folder / "run"), *flags)
        command = [*MH, *run, *more, "-m", script, name, *(words or (str(10**9),))]
        environment = {**plain_environment(allocator=False), "MANYHANDS_CHAOS": "1"}
        with _process(command, environment, folder / "log") as process:
            yield Struck(process, folder)


@contextmanager
def _process(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
    try:
        yield process
    except ScriptFailed as error:
        raise ScriptFailed(f"{error}\n{log.read_text(errors='replace')[-2000:]}") from error
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):  # the second one ends it at once
            if process.poll() is None:
                process.send_signal(number)
        try:
            process.wait(20.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _kills(num_kills: int) -> dict[str, list[float]]:
    """kill -9 to the next step; the stall when the replacement joins; torchrun's restart for comparison."""
    draw, recovered, stalls = random.Random(0), [], []
    with striking() as run:
        status = run.settled()
        for _ in range(num_kills):
            recovered.append(run.strike("kill", draw.choice(status.members), status))
            status = run.settled()
            joined = next(one.at_s for one in run.commits() if one.generation == _generation(status))
            time.sleep(1.0)  # what follows the switch of generations belongs to the stall
            stalls.append(stall(run.commits(), joined))
    found = {OURS: recovered, "stall at a join": stalls}
    return {**found, "torchrun": _torchrun(max(1, num_kills * RESTARTS // KILLS))}


def _halts(kind: str, count: int) -> dict[str, list[float]]:
    draw, recovered = random.Random(0), []
    with striking() as run:
        for _ in range(count):
            status = run.settled()
            recovered.append(run.strike(kind, draw.choice(status.members), status))
    return {OURS: recovered}


def _goodput(num_kills: int) -> dict[str, list[float]]:
    """One kill every 15 s: steps in that time over those of an undisturbed run, and the share of it not in recovery."""
    window_s = num_kills * EVERY_S
    with striking() as run:
        run.settled()
        began = time.monotonic()
        time.sleep(window_s)
        undisturbed = commits_between(run.commits(), began, began + window_s)
    draw, recovering_s = random.Random(0), 0.0
    with striking() as run:
        run.settled()
        began = time.monotonic()
        for number in range(num_kills):
            time.sleep(max(0.0, began + (number + 0.5) * EVERY_S - time.monotonic()))
            status = query(run.run_dir)
            members = [one for one in status.members if one.rank >= 0]
            recovering_s += run.strike("kill", draw.choice(members), status)
        time.sleep(max(0.0, began + window_s - time.monotonic()))
        disturbed = commits_between(run.commits(), began, began + window_s)
    return {"goodput": [disturbed / undisturbed], "uptime": [1.0 - recovering_s / window_s]}


# ---- torchrun ----


def _torchrun(count: int) -> list[float]:
    """kill -9 of a rank to the next step after torchrun's restart of all; empty if it did not restart."""
    found: list[float] = []
    with tempfile.TemporaryDirectory(prefix="manyhands-bench-") as name:
        folder = Path(name)
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)),
            *(
                "--max-restarts",
                "1000",
                "--monitor-interval",
                "0.1",
                "-m",
                "bench.recovery.recovery_torchrun_script",
                name,
            ),
        ]
        with _process(command, plain_environment(), folder / "log") as process:
            run, draw = Struck(process, folder), random.Random(0)
            try:
                for number in range(count):
                    run.until(lambda n=number: _has_steps(run.commits(), (n,)), READY_S, "steps")
                    began = time.monotonic()
                    os.kill(draw.choice(_ranks(process.pid)), signal.SIGKILL)
                    later = run.until(
                        lambda n=number: first_in_later(run.commits(), (n,)),
                        RECOVER_S,
                        "step after kill",
                    )
                    found.append(later.at_s - began)
            except ScriptFailed as error:
                print(f"torchrun: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
    return found


def _has_steps(commits: list[Commit], generation: tuple[int, ...]) -> bool | None:
    return sum(commit.generation == generation for commit in commits) >= SETTLED_STEPS * WORKERS or None


def _ranks(launcher: int) -> list[int]:
    children = psutil.Process(launcher).children()
    return [child.pid for child in children if "bench.recovery.recovery_torchrun_script" in child.cmdline()]
