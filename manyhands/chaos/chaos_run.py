"""Plays a script twice: undisturbed, and with faults; then compares. The shell around `fault_schedule`, `strikes`,
`chaos_report`.

Each run is a real `mh run` in a process of its own, which tells its events on standard output: unlike the chief's file,
that record loses nothing when the chief is killed. Start reading at `play`.
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

from manyhands.chaos.chaos_report import Report, Weights, judge
from manyhands.chaos.extra_agents import Agents
from manyhands.chaos.fault_injection import Strike, Striker, Timeline
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
# What a run's processes get to be gone after they were told to.
GONE_AFTER_S = 20.0
TAIL_CHARS = 3000


class Chaos(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for."""

    words: list[str]
    """What follows `mh run`: settings, script, arguments; without a run directory and a number of restarts."""
    max_restarts: int
    """Of the run with faults; deaths of the undisturbed one are the script's own."""
    folder: Path
    """Where both runs, their events and the report go."""
    faults: Sequence[Fault]
    minutes: float
    agents: int = 1
    """Of the run; all but the first are started here, with `agent_words` each."""
    agent_words: Sequence[str] = ()
    wait_s: float
    """How long a run may take to its first step, and from the end of the faults to its own."""
    reference: bool = True


def play(asked: Chaos, say: Callable[[str], None]) -> Report:
    """Run, strike, and judge. Raises `TrainingFailed` where the script fails without any fault, or does not end."""
    asked.folder.mkdir(parents=True, exist_ok=True)
    with ended_by_signals():
        undisturbed = _undisturbed(asked, say) if asked.reference else None
        disturbed, strikes = _disturbed(asked, say)
    return judge(
        strikes,
        read_run_events(disturbed.run_dir, disturbed.told),
        undisturbed.commits if undisturbed is not None else [],
        exit_code=disturbed.exit_code,
        scheduled=len(asked.faults),
        minutes=asked.minutes,
        weights=_weights(disturbed, undisturbed) if undisturbed is not None else None,
    )


def _undisturbed(asked: Chaos, say: Callable[[str], None]) -> _Run:
    say("undisturbed run ...")
    run = _Run(asked, "reference", max_restarts=0)
    with run.started():
        run.wait(Timeline())
    run.must_have_ended_well()
    say(f"undisturbed run: {len(run.commits)} steps in {run.seconds:.1f} s")
    return run


def _disturbed(asked: Chaos, say: Callable[[str], None]) -> tuple[_Run, list[Strike]]:
    run, timeline = _Run(asked, "chaos", max_restarts=asked.max_restarts), Timeline()
    striker = Striker(run.run_dir, timeline, run.agents, lambda struck: say(_told(struck)))
    with run.started():
        run.wait_for_first_step()
        began = time.monotonic()
        for fault in asked.faults:
            timeline.add(began + fault.at_s, functools.partial(striker.strike, fault))
        run.wait(timeline)
    return run, striker.strikes


def _told(struck: Strike) -> str:
    fault = struck.fault
    place = f" at step {struck.step}" if struck.step is not None else ""
    return f"{fault.number}. {fault.kind}: " + (struck.skipped or f"{struck.who}{place}")


class _Run:
    """One run of the script, from its start to its end."""

    def __init__(self, asked: Chaos, name: str, *, max_restarts: int) -> None:
        self._asked, self._max_restarts = asked, max_restarts
        self.run_dir, self.told = asked.folder / name, asked.folder / f"{name}.jsonl"
        self._said = asked.folder / f"{name}.err"
        self._process: subprocess.Popen[bytes] | None = None
        self._join_file = asked.folder / f"{name}.join"
        self.agents = Agents(asked.agents - 1, asked.agent_words, self._join_file, asked.folder / f"{name}.agents.txt")
        self._read_bytes = 0
        self.commits: list[Event] = []
        self.exit_code = -1
        self.seconds = 0.0

    @contextmanager
    def started(self) -> Iterator[None]:
        """Inside, the run is alive or over; afterwards nothing of it is left."""
        command = [
            *(sys.executable, "-m", "manyhands.cli.main", "run", "--json"),
            *("--run-dir", str(self.run_dir), "--max-restarts", str(self._max_restarts)),
        ]
        if self._asked.agents > 1:  # as on several hosts, but nothing leaves this one
            command += ["--hosts-wanted", str(self._asked.agents), "--listen", "127.0.0.1"]
            command += ["--join-file", str(self._join_file), "--insecure-data-plane"]
        began = time.monotonic()
        with self.told.open("wb") as told, self._said.open("wb") as said:
            self._process = subprocess.Popen(
                [*command, *self._asked.words],
                stdout=told,
                stderr=said,
                env={**environment(), CHAOS_VARIABLE: "1"},
                start_new_session=True,  # Ctrl-C is for us; we end the run
            )
        try:
            if self._asked.agents > 1:
                self.agents.start(self._asked.wait_s, lambda: self._process is None or self._process.poll() is not None)
            yield
        finally:
            self.exit_code = _end(self._process)
            self.agents.end()
            self.seconds = time.monotonic() - began
            self._read()

    def wait_for_first_step(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._asked.wait_s
        while not self.commits:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise self._failed(f"there was no step within {self._asked.wait_s:g} s")
            time.sleep(POLL_S)
            self._read()

    def wait(self, timeline: Timeline) -> None:
        """Until the run ends, or has taken too long; plays what is on the timeline meanwhile."""
        assert self._process is not None
        deadline = time.monotonic() + 60.0 * self._asked.minutes + self._asked.wait_s
        while self._process.poll() is None and time.monotonic() < deadline:
            timeline.play()
            time.sleep(POLL_S)

    def must_have_ended_well(self) -> None:
        if self.exit_code != 0 or not self.commits:
            raise self._failed("it did not end by itself" if self.commits else "it trained nothing")

    def _read(self) -> None:
        with self.told.open("rb") as file:
            file.seek(self._read_bytes)
            *lines, rest = file.read().split(b"\n")
            self._read_bytes = file.tell() - len(rest)
        self.commits += [event for line in lines if isinstance(event := parse_line(line), StepDone)]

    def _failed(self, what: str) -> TrainingFailed:
        words = _failure(self.told) or self._said.read_text(errors="replace") + self.agents.said()
        words = words[-TAIL_CHARS:].strip()
        code = "" if self.exit_code == -1 else f" (exit code {self.exit_code})"
        return TrainingFailed(
            f"The script cannot be put to the test: {what}{code}." + (f" It said:\n{words}" if words else ""),
            fix=["mh run with the same words, to see what it does", f"--wait {2 * self._asked.wait_s:g}"],
        )


def _failure(told: Path) -> str:
    """What the launcher said of the failure that ended the run; empty if it said nothing."""
    lines = [line for line in told.read_bytes().splitlines() if line.startswith(b'{"event": "Failure"')]
    if not lines:
        return ""
    facts = msgspec.json.decode(lines[-1])
    return render(msgspec.convert({name: facts[name] for name in facts if name != "event"}, Failure))


def _end(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a run that has ended, or is told to, now."""
    for number in (signal.SIGTERM, signal.SIGINT):  # the second signal ends a run at once
        if process.poll() is None:
            process.send_signal(number)
    try:
        return process.wait(GONE_AFTER_S)
    except subprocess.TimeoutExpired:
        process.kill()  # its guard ends what it leaves
        return process.wait()


def _weights(disturbed: _Run, undisturbed: _Run) -> Weights:
    return compare_weights(disturbed.run_dir / "checkpoints", undisturbed.run_dir / "checkpoints")


def compare_weights(checkpoints: Path, reference: Path) -> Weights:
    """The newest checkpoint of each folder, bit for bit."""
    mine, theirs = _newest(checkpoints), _newest(reference)
    ours, others = (one.tensors if one is not None else {} for one in (mine, theirs))
    names = sorted(ours.keys() | others.keys())
    return Weights(
        step=mine.manifest.step if mine is not None else -1,
        reference_step=theirs.manifest.step if theirs is not None else -1,
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
