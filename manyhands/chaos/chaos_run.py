"""Runs a script twice, without and with faults, and compares. Drives `fault_schedule`, `fault_injection` and
`chaos_report`.

Each run is a real `mh run` in a separate process, which prints its events on standard output: unlike the chief's file,
that record is complete even if the chief is killed. Start reading at `play`.
"""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from manyhands.chaos.chaos_report import ChaosReport, Weights, judge
from manyhands.chaos.extra_agents import ExtraAgents
from manyhands.chaos.fault_injection import FaultTimeline, Strike, Striker
from manyhands.chaos.fault_schedule import Fault
from manyhands.checkpoint.reader import Loaded, load, newest_valid
from manyhands.control.messages.failure import Failure, render
from manyhands.errors import TrainingFailed
from manyhands.events import Event, StepDone
from manyhands.observe.recorder import parse_line
from manyhands.observe.run_audit import read_run_events
from manyhands.spec.load import CHAOS_VARIABLE, environment
from manyhands.trials.trial_runner import ended_by_signals

__all__ = ["Chaos", "compare_weights", "play"]

POLL_S = 0.02
# How long a run's processes may take to end after a signal.
GONE_AFTER_S = 20.0
TAIL_CHARS = 3000


class Chaos(msgspec.Struct, frozen=True, kw_only=True):
    """Request of `mh chaos`."""

    words: list[str]
    """Arguments of `mh run`: settings, script, its arguments; without run directory and number of restarts."""
    max_restarts: int
    """Of the run with faults; in the run without faults, a lost worker is an error of the script."""
    folder: Path
    """Directory of both runs, their events and the report."""
    faults: Sequence[Fault]
    minutes: float
    agents: int = 1
    """Number of agents; all but the first are started here, with `agent_words` each."""
    agent_words: Sequence[str] = ()
    wait_s: float
    """How long a run may take to its first step, and from the end of the faults to its end."""
    reference: bool = True


def play(asked: Chaos, say: Callable[[str], None]) -> ChaosReport:
    """Run, inject faults, and evaluate. Raises `TrainingFailed` if the script fails without faults, or does not end."""
    asked.folder.mkdir(parents=True, exist_ok=True)
    with ended_by_signals():
        reference = _run_without_faults(asked, say) if asked.reference else None
        chaos, strikes = _run_with_faults(asked, say)
    return judge(
        strikes,
        read_run_events(chaos.run_dir, chaos.events_file),
        reference.commits if reference is not None else [],
        exit_code=chaos.exit_code,
        scheduled=len(asked.faults),
        minutes=asked.minutes,
        weights=_weights(chaos, reference) if reference is not None else None,
    )


def _run_without_faults(asked: Chaos, say: Callable[[str], None]) -> _Run:
    say("run without faults ...")
    run = _Run(asked, "reference", max_restarts=0)
    with run.started():
        run.wait(FaultTimeline())
    run.check_success()
    say(f"run without faults: {len(run.commits)} steps in {run.seconds:.1f} s")
    return run


def _run_with_faults(asked: Chaos, say: Callable[[str], None]) -> tuple[_Run, list[Strike]]:
    run, timeline = _Run(asked, "chaos", max_restarts=asked.max_restarts), FaultTimeline()
    striker = Striker(run.run_dir, timeline, run.agents, lambda strike: say(_fault_line(strike)))
    with run.started():
        run.wait_for_first_step()
        started_at = time.monotonic()
        for fault in asked.faults:
            timeline.add(started_at + fault.at_s, functools.partial(striker.strike, fault))
        run.wait(timeline)
    return run, striker.strikes


def _fault_line(strike: Strike) -> str:
    fault = strike.fault
    where = f" at step {strike.step}" if strike.step is not None else ""
    return f"{fault.number}. {fault.kind}: " + (strike.skipped or f"{strike.who}{where}")


class _Run:
    """One run of the script, from its start to its end."""

    def __init__(self, asked: Chaos, name: str, *, max_restarts: int) -> None:
        self._asked, self._max_restarts = asked, max_restarts
        self.run_dir, self.events_file = asked.folder / name, asked.folder / f"{name}.jsonl"
        self._stderr_file = asked.folder / f"{name}.err"
        self._process: subprocess.Popen[bytes] | None = None
        self._join_file = asked.folder / f"{name}.join"
        self.agents = ExtraAgents(
            asked.agents - 1, asked.agent_words, self._join_file, asked.folder / f"{name}.agents.txt"
        )
        self._read_bytes = 0
        self.commits: list[Event] = []
        self.exit_code = -1
        self.seconds = 0.0

    @contextmanager
    def started(self) -> Iterator[None]:
        """Inside, the run is alive or has ended; afterwards none of its processes is left."""
        command = [
            *(sys.executable, "-m", "manyhands.cli.main", "run", "--on=here", "--json"),
            *("--run-dir", str(self.run_dir), "--max-restarts", str(self._max_restarts)),
        ]
        if self._asked.agents > 1:  # as on several hosts, but over loopback
            command += ["--hosts-wanted", str(self._asked.agents), "--listen", "127.0.0.1"]
            command += ["--join-file", str(self._join_file), "--insecure-data-plane"]
        started_at = time.monotonic()
        with self.events_file.open("wb") as events_file, self._stderr_file.open("wb") as stderr:
            self._process = subprocess.Popen(
                [*command, *self._asked.words],
                stdout=events_file,
                stderr=stderr,
                env={**environment(), CHAOS_VARIABLE: "1"},
                start_new_session=True,  # Ctrl-C reaches only this process, which ends the run
            )
        try:
            if self._asked.agents > 1:
                self.agents.start(self._asked.wait_s, lambda: self._process is None or self._process.poll() is not None)
            yield
        finally:
            self.exit_code = _end(self._process)
            self.agents.end()
            self.seconds = time.monotonic() - started_at
            self._read()

    def wait_for_first_step(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._asked.wait_s
        while not self.commits:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise self._failed(f"there was no step within {self._asked.wait_s:g} s")
            time.sleep(POLL_S)
            self._read()

    def wait(self, timeline: FaultTimeline) -> None:
        """Wait until the run ends or takes too long; inject the faults of the timeline meanwhile."""
        assert self._process is not None
        deadline = time.monotonic() + 60.0 * self._asked.minutes + self._asked.wait_s
        while self._process.poll() is None and time.monotonic() < deadline:
            timeline.play()
            time.sleep(POLL_S)

    def check_success(self) -> None:
        if self.exit_code != 0 or not self.commits:
            raise self._failed("it did not end successfully" if self.commits else "it committed no step")

    def _read(self) -> None:
        with self.events_file.open("rb") as file:
            file.seek(self._read_bytes)
            *lines, rest = file.read().split(b"\n")
            self._read_bytes = file.tell() - len(rest)
        self.commits += [event for line in lines if isinstance(event := parse_line(line), StepDone)]

    def _failed(self, what: str) -> TrainingFailed:
        words = _failure(self.events_file) or self._stderr_file.read_text(errors="replace") + self.agents.output()
        words = words[-TAIL_CHARS:].strip()
        code = "" if self.exit_code == -1 else f" (exit code {self.exit_code})"
        return TrainingFailed(
            f"The script cannot be tested: {what}{code}." + (f" Its output:\n{words}" if words else ""),
            fix=["mh run with the same arguments, to see what it does", f"--wait {2 * self._asked.wait_s:g}"],
        )


def _failure(events_file: Path) -> str:
    """The launcher's report of the failure that ended the run; empty if there is none."""
    lines = [line for line in events_file.read_bytes().splitlines() if line.startswith(b'{"event": "Failure"')]
    if not lines:
        return ""
    facts = msgspec.json.decode(lines[-1])
    return render(msgspec.convert({name: facts[name] for name in facts if name != "event"}, Failure))


def _end(process: subprocess.Popen[bytes]) -> int:
    """End the run if it has not ended; returns its exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):  # the second signal ends a run at once
        if process.poll() is None:
            process.send_signal(number)
    try:
        return process.wait(GONE_AFTER_S)
    except subprocess.TimeoutExpired:
        process.kill()  # its guard ends the processes that it leaves
        return process.wait()


def _weights(chaos: _Run, reference: _Run) -> Weights:
    return compare_weights(chaos.run_dir / "checkpoints", reference.run_dir / "checkpoints")


def compare_weights(checkpoints: Path, reference: Path) -> Weights:
    """Compare the newest checkpoints of both folders bit for bit."""
    chaos_checkpoint, reference_checkpoint = _newest(checkpoints), _newest(reference)
    ours, others = (one.tensors if one is not None else {} for one in (chaos_checkpoint, reference_checkpoint))
    names = sorted(ours.keys() | others.keys())
    return Weights(
        step=chaos_checkpoint.manifest.step if chaos_checkpoint is not None else -1,
        reference_step=reference_checkpoint.manifest.step if reference_checkpoint is not None else -1,
        tensors=len(names),
        different=[name for name in names if not _same_bits(ours.get(name), others.get(name))],
    )


def _newest(folder: Path) -> Loaded | None:
    found = newest_valid(folder)
    return load(found.path) if found is not None else None


def _same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))
