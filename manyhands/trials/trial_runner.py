"""Trials, and tuning by them: runs the script for a few seconds with each setting, and reports which was fastest.

A trial is a real run in a temporary directory. It is killed in the middle of its training, so the script's code after
the training does not run; it writes no checkpoint, and `save` does nothing in it. What to try and what to choose is
decided in `tuning_search`. Start reading at `run_trial` and `tune`.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import msgspec
from msgspec.structs import replace

from manyhands import errors
from manyhands.control.messages.launch_request import WorkerCommand
from manyhands.errors import ManyhandsError, TrainingFailed, UsageError
from manyhands.events import Event, RunEnded, RunStarted, StepDone
from manyhands.launcher.launch import own_command, place
from manyhands.launcher.machine import this_machine
from manyhands.observe.event_text import clean, count, duration
from manyhands.observe.recorder import parse_line
from manyhands.spec.load import KEYS, TRIAL_VARIABLE, Resolved, environment, resolve
from manyhands.spec.strategy_names import AVERAGING
from manyhands.trials import tuning_search
from manyhands.trials.trial_process import Failed, TrialRequest, Wrote
from manyhands.trials.tuning_search import Gauge, Ground, Measured, Result, Trial, TuningChoice

__all__ = [
    "SECONDS",
    "WAIT_S",
    "RunningTrial",
    "Tuned",
    "Tuning",
    "by_dotted_key",
    "ended_by_signals",
    "run_trial",
    "tune",
    "tune_this_script",
]

SECONDS = 3.0
WAIT_S = 120.0
# How long a trial's processes may take to end after SIGINT before its launcher is killed.
GONE_AFTER_S = 15.0
AGAIN_AFTER_S = 0.1
IN_A_TRIAL = {"run.max_restarts": 0, "launch.ui": "none"}
LINES_KEPT = 12
WORDS_KEPT = 100

_reports: msgspec.json.Decoder[Failed | Wrote] = msgspec.json.Decoder(Failed | Wrote)


class RunningTrial:
    """A trial between its start and its end, in a separate process: `trial_process`."""

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path) -> None:
        self.run_dir = run_dir
        self.has_ended = False
        """Whether its launcher has ended, as far as `reports` was iterated."""
        self._process = process

    def reports(self, until: Callable[[], float]) -> Iterator[Event | Failed | Wrote]:
        """What its launcher reports, until it ends, or until `until()` by the monotonic clock."""
        assert self._process.stdout is not None
        reading, rest = self._process.stdout.fileno(), b""
        os.set_blocking(reading, False)
        with selectors.DefaultSelector() as selector:
            selector.register(reading, selectors.EVENT_READ)
            while (left_s := until() - time.monotonic()) > 0:
                if not selector.select(left_s):
                    continue
                data = os.read(reading, 2**16)
                if not data:
                    self.has_ended = True
                    return
                *lines, rest = (rest + data).split(b"\n")
                yield from filter(None, map(_parse, lines))


def _parse(line: bytes) -> Event | Failed | Wrote | None:
    if (event := parse_line(line)) is not None:
        return event
    with contextlib.suppress(msgspec.DecodeError):
        return _reports.decode(line)
    return None


@contextlib.contextmanager
def run_trial(request: TrialRequest, **variables: str) -> Iterator[RunningTrial]:
    """Run a trial, with these variables in its environment; when the context ends, so have all of its processes."""
    with tempfile.TemporaryDirectory(prefix="manyhands-trial-", ignore_cleanup_errors=True) as folder:
        run_dir = os.path.join(folder, "run")
        flags = {**request.flags, **IN_A_TRIAL, "run.run_dir": run_dir}
        request = replace(request, run_dir=run_dir, parent=os.getpid(), flags=flags)
        process = subprocess.Popen(
            [sys.executable, "-m", "manyhands.trials.trial_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment(), TRIAL_VARIABLE: "1", **variables},
            start_new_session=True,  # Ctrl-C reaches only this process, which ends the trial
        )
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(msgspec.json.encode(request))
            yield RunningTrial(process, Path(run_dir))
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the trial's workers through its launcher, and wait until all have ended: the next trial needs the cores."""
    with process:
        assert process.stdout is not None
        process.stdout.close()  # or a launcher with much output would block until it is read
        give_up_at = time.monotonic() + GONE_AFTER_S
        while process.poll() is None and time.monotonic() < give_up_at:
            # The second Ctrl-C ends a run at once, without a checkpoint; but two in quick succession may arrive as one.
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(AGAIN_AFTER_S)
        if process.poll() is None:
            process.kill()  # its guard ends the processes that it leaves


def by_dotted_key(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {KEYS[name].dotted: value for name, value in flags.items()}


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """Request of `mh tune`."""

    command: WorkerCommand
    flags: dict[str, Any] = {}
    """Settings that are not varied, by name."""
    arguments: dict[str, Any] = {}
    """The script's constructor arguments, where they are known; a trial may override them."""
    config_file: str | None = None
    most_workers: int | None = None
    """Default: the cores; with accelerators, their number."""
    seconds: float = SECONDS
    """How long each trial is measured, after its first steps."""
    wait_s: float = WAIT_S
    """How long a trial may take to its first step, and from there, beyond `seconds`, to its end."""
    allow_maths: bool = False


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    ground: Ground
    results: list[Result]
    choice: TuningChoice
    notes: list[str]
    flags: dict[str, Any]
    """Flags of the choice, by dotted key; empty if the default is best."""
    settings: dict[str, dict[str, Any]]
    """Settings of the choice, as sections of a config file."""
    seconds: float

    def text(self) -> str:
        lines = [tuning_search.table(self.ground, self.results, self.choice), self._outcome(), *self.notes]
        return "\n".join(lines)

    def _outcome(self) -> str:
        choice, speed = self.choice, "the default; no other setting was faster"
        if self.flags:
            noise = f"two runs of which differed by {100 * choice.noise:.0f}%"
            speed = f"{choice.ratio:.2f} times the rows per second of the default, {noise}"
        if choice.too_noisy:
            return (
                f"too noisy, try again: two measurements of the same setting differ by {100 * choice.noise:.0f}%, so "
                "nothing is chosen. Stop other programs on this machine, or measure longer: --seconds 30"
            )
        return f"chosen: {_describe(choice.trial)}: {speed}"


def tune(asked: Tuning, say: Callable[[str], None]) -> Tuned:
    """Try, measure and choose; `say` gets a line for each trial. Takes some seconds for each, and always ends.

    Raises if the script fails with its default settings; another setting that fails is only not chosen.
    """
    environ, started_at = environment(), time.monotonic()
    resolved = resolve(flags=asked.flags, arguments=asked.arguments, environ=environ, config_file=asked.config_file)
    if place(resolved, environ).num_hosts > 1:
        raise UsageError("Tuning measures one host, but this run has several.", fix=["mh tune on one of them"])
    with ended_by_signals():
        first = _MeasuredTrial(asked, {}).run()
        if first.started is None or first.measured is None:
            raise first.error()
        ground = _ground(asked, resolved, first.started, environ)
        results: list[Result] = []
        trial: Trial | None = ground.default
        while trial is not None:
            changes = tuning_search.flags_of(trial, ground.default)
            outcome = _MeasuredTrial(asked, changes).run() if results else first
            results.append(Result(trial=trial, measured=outcome.measured, failed=outcome.reason))
            say(f"{len(results)}. {_describe(trial)}: {_speed(results[-1])}")
            trial = tuning_search.next_trial(ground, results)
    choice = tuning_search.choose(ground, results)
    settings: dict[str, dict[str, Any]] = {}
    for name, value in tuning_search.settings_of(choice.trial, ground.default).items():
        settings.setdefault(KEYS[name].section, {})[name] = value
    return Tuned(
        ground=ground,
        results=results,
        choice=choice,
        notes=[*tuning_search.notes(ground, results, choice), *_overruled(first.started, settings)],
        flags=tuning_search.flags_of(choice.trial, ground.default),
        settings=settings,
        seconds=time.monotonic() - started_at,
    )


def _ground(asked: Tuning, resolved: Resolved, started: RunStarted, environ: Mapping[str, str]) -> Ground:
    machine, launch = this_machine(environ), resolved.spec.launch
    default = Trial(
        workers=started.workers,
        threads=started.threads,
        memory_format=launch.memory_format,
        allocator=launch.allocator,
        precision=started.precision,
    )
    most = 1 if started.strategy == "single" else asked.most_workers or machine.accelerators or machine.cores
    return Ground(
        default=default,
        slices=started.slices,
        cores=machine.cores,
        most_workers=most,
        allow_maths=asked.allow_maths,
        exact=started.exact,
        averages=started.strategy in AVERAGING,
        slices_given="train.slices" in started.origins,
        depends_on_slices=started.depends_on_slices,
        pinned=frozenset(asked.flags),
    )


def _overruled(started: RunStarted, settings: dict[str, dict[str, Any]]) -> list[str]:
    """A note if constructor arguments of the script override settings of the choice in a config file."""
    names = [name for section in settings for name in settings[section]]
    in_script = [name for name in names if started.origins.get(KEYS[name].dotted) == "constructor"]
    return (
        [f"The script sets {', '.join(in_script)}: flags override that, a config file does not."] if in_script else []
    )


def _describe(trial: Trial) -> str:
    split = f"{trial.workers} worker{'s' * (trial.workers > 1)} x {trial.threads} thread{'s' * (trial.threads > 1)}"
    slices = [f"V={trial.slices}"] if trial.slices is not None else []
    return ", ".join([split, *slices, trial.memory_format, trial.allocator, trial.precision])


def _speed(result: Result) -> str:
    return f"{count(result.measured.rows_per_s)} rows/s" if result.measured else f"failed: {result.failed}"


class _MeasuredTrial:
    """One run of the script with these flags, from its start to the end of its last process."""

    def __init__(self, asked: Tuning, flags: dict[str, Any]) -> None:
        self.started: RunStarted | None = None
        self._asked, self._flags = asked, flags
        self._gauge = Gauge(asked.seconds)
        self._failed: Failed | None = None
        self._ended = False
        self._stderr: deque[str] = deque(maxlen=LINES_KEPT)
        self._first_step_at: float | None = None

    def run(self) -> _MeasuredTrial:
        asked = self._asked
        request = TrialRequest(
            command=asked.command,
            flags={**by_dotted_key(asked.flags), **self._flags},  # the last one wins
            arguments=asked.arguments,
            config_file=asked.config_file,
        )
        with run_trial(request) as trial:
            started_at = time.monotonic()
            for report in trial.reports(until=lambda: self._deadline(started_at)):
                self._take(report)
                if self._gauge.enough:
                    break
            self._ended = self._ended or trial.has_ended
        return self

    def _deadline(self, started_at: float) -> float:
        if self._first_step_at is None:
            return started_at + self._asked.wait_s
        return self._first_step_at + self._asked.seconds + self._asked.wait_s

    def _take(self, report: Event | Failed | Wrote) -> None:
        match report:
            case StepDone() as step:
                self._first_step_at = self._first_step_at or time.monotonic()
                self._gauge.add(step.rows, step.took_s)
            case RunStarted() as started:
                self.started = self.started or started
            case Failed() as failed:
                self._failed = failed
            case Wrote(text=text):
                self._stderr.extend(text.splitlines())
            case RunEnded():
                self._ended = True

    @property
    def measured(self) -> Measured | None:
        return self._gauge.measured(self.started.slices if self.started else 0)

    @property
    def reason(self) -> str:
        """Why there is no measurement, in a few words; empty if there is one."""
        if self.measured is not None:
            return ""
        if self._failed is not None:
            return clean(self._failed.reason)[:WORDS_KEPT]
        steps = f"after {self._gauge.steps} steps" if self._gauge.steps else "without a step of mh.Trainer or mh.join"
        if self._ended:
            return f"the training ended {steps}"
        return f"no step within {self._asked.wait_s:g} s" if not self._gauge.steps else "its steps take too long"

    def error(self) -> ManyhandsError:
        """The error for a script that cannot be measured at all."""
        if self._failed is not None:
            kind = getattr(errors, self._failed.error, TrainingFailed)
            return (
                kind(self._failed.details)
                if self._failed.error
                else TrainingFailed(f"The script fails, so there is nothing to tune.\n{self._failed.details}")
            )
        output = "".join(f"\n  {clean(line)}" for line in self._stderr)
        script = shlex.join([self._asked.command.target, *self._asked.command.args])
        fix = [f"mh run {script}, to see what it does", f"--wait {2 * self._asked.wait_s:g}"]
        return TrainingFailed(
            f"The script cannot be measured: {self.reason}." + (f" Its last output:{output}" if output else ""),
            fix=fix[:1] if self._ended else fix,
        )


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside, SIGTERM unwinds the stack as Ctrl-C does, so that no process or directory of a trial is left."""

    def on_signal(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def tune_this_script(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """For `tune=True` in a script started by hand: print the table to stderr, and return the choice as flags."""

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    command = own_command(environment(), "tune=True was given")
    given = {name: value for name, value in arguments.items() if value is not None}
    say("tune=True: trying settings for a few seconds each; `mh tune --write FILE` saves the choice")
    tuned = tune(Tuning(command=command, arguments=given), say)
    say(tuned.text())
    say(f"tuned in {duration(tuned.seconds)}")
    return tuned.flags
