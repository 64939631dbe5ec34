"""`mh profile`: runs the script as it is, and without one cost after the other, and finds what holds it back.

Each run is a trial in a temporary directory, as in `mh tune`. Trials are interleaved in rounds that begin and end with
the script as it is. Which ways are tried is `ways_for` and `remedies_for` (pure); what their times mean, and the noise,
is decided in `profiling.verdict`. Start reading at `profile`.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec

from manyhands import errors
from manyhands.control.messages.launch_request import WorkerCommand
from manyhands.errors import TrainingFailed, UsageError
from manyhands.events import RunEnded, StepDone
from manyhands.launcher.launch import place
from manyhands.launcher.machine import this_machine
from manyhands.observe.event_text import clean
from manyhands.planner.measure.plan_request import WAYS_TO_TRAIN
from manyhands.profiling.layer_times import merge_layers
from manyhands.profiling.profile_report import ProfileReport, WorkerTimes
from manyhands.profiling.step_recorder import RecordedSteps
from manyhands.profiling.step_records import (
    TRACE_NAME,
    WARM_UP_STEPS,
    WorkerFacts,
    WorkerRecord,
    mean_phases,
    read_records,
    waiting_by_peer,
)
from manyhands.profiling.trace_file import merge
from manyhands.profiling.verdict import AS_IS, Round, Verdict, Way, judge
from manyhands.spec.load import PROFILE_VARIABLE, environment, resolve
from manyhands.spec.probe_requests import ProfileOrder
from manyhands.spec.strategy_names import LIMITS
from manyhands.trials.trial_process import Failed, TrialRequest, Wrote
from manyhands.trials.trial_runner import RunningTrial, by_dotted_key, run_trial

__all__ = ["Profiling", "profile", "remedies_for", "ways_for"]

LEAST_STEPS = 4
"""Fewer measured steps than these say nothing."""
MOST_STEPS = 4000
MEASURED_S, MOST_MEASURED_S = 1.5, 10.0
"""A trial is measured at least so long, if it takes as many steps as that, and not much longer."""
PARTS, STEPS_OF_PART = 10, 20
"""Where steps are short, a trial's time is the median of so many parts of it: what another program does for an instant
takes as long as many of them."""
MORE_ROUNDS = 2
"""Repeated at most, while the trials differ too much to say anything."""
TRACED_STEPS = 3
LINES_KEPT = 8
LOOK_EVERY_S = 0.5
"""How often a trial that reports nothing is looked at, to see whether it was aborted."""
ENDED = "the training ended"
NO_STEP = "no step of mh.Trainer, mh.join, or Keras under a scope()"
TIMEOUT_S = 300.0
"""Of collectives in a trial: workers that fetch all their data first do not begin at the same time."""


class Profiling(msgspec.Struct, frozen=True, kw_only=True):
    """Request of `mh profile`."""

    command: WorkerCommand
    flags: dict[str, Any] = {}
    """Settings by name."""
    config_file: str | None = None
    steps: int = 20
    """Steps that each trial measures; more if they are short, fewer if they are long."""
    rounds: int = 3
    wait_s: float = 120.0
    """How long a trial may take to its first step, and from there, beyond its measured steps, to its end."""


class TrialTimes(NamedTuple):
    """What a trial has shown: mean seconds of a step; or why it has shown nothing."""

    step_s: float
    records: list[WorkerRecord]
    failed: str = ""
    steps: int | None = None
    """How many it had, if the training ended before it was killed."""


def profile(asked: Profiling, say: Callable[[str], None]) -> tuple[ProfileReport, dict[str, Any]]:
    """The report, and the trace of all workers. `say` gets a line for each trial.

    Raises if the script fails as it is; a way that fails is only not tried.
    """
    started_at, environ = time.monotonic(), environment()
    resolved = resolve(flags=asked.flags, environ=environ, config_file=asked.config_file)
    if place(resolved, environ).num_hosts > 1:
        raise UsageError("mh profile measures one host, but this run has several.", fix=["mh profile on one of them"])
    runner, first_at = _Runner(asked), time.monotonic()
    first = runner.run(AS_IS, asked.steps)
    wanted = first.records[0].facts.wanted_workers if first.records else None
    if wanted is not None and resolved.origins["launch.workers"] == "default":
        runner.flags["launch.workers"] = wanted  # as many as `python train.py` starts
        if wanted != first.records[0].facts.workers:
            first_at = time.monotonic()
            first = runner.run(AS_IS, asked.steps)
    if first.failed:
        raise runner.error(first)
    facts, cores, trial_s = first.records[0].facts, this_machine(environ).cores, time.monotonic() - first_at
    runner.facts, runner.steps = facts, steps_for(first.step_s, asked.steps, first.steps)
    say(f"as it is: {1000 * first.step_s:.1f} ms per step; {runner.steps} steps in each of the next trials")
    ways, untried = ways_for(facts, cores, asked.flags.keys())
    search = _Search(runner, asked.rounds, say, untried)
    count = asked.rounds * (len(ways) + 2) + 1
    say(f"{count} trials of about {trial_s:.0f} s follow; more where it is worth trying other settings")
    verdict = search.try_all(ways)
    remedies = remedies_for(verdict, facts, asked.flags.keys())
    while remedies:
        verdict = search.try_all(remedies)
        remedies = [way for way in remedies_for(verdict, facts, asked.flags.keys()) if way.name not in search.tried]
    more_rounds = 0
    while verdict.holds_back is None and more_rounds < MORE_ROUNDS:
        say("too noisy: one more round")
        verdict, more_rounds = search.try_again(ways), more_rounds + 1
    traced = runner.trace()
    report = ProfileReport(
        facts=facts,
        steps=runner.steps,
        rounds=asked.rounds + more_rounds,
        verdict=verdict,
        workers=[_times_of(record) for record in search.as_is],
        waiting=[(rank, peer, seconds) for (rank, peer), seconds in _waiting(search.as_is).items()],
        layers=merge_layers([one.layers for one in traced]),
        seconds=time.monotonic() - started_at,
    )
    return report, merge([one.trace for one in traced]) if traced else {}


def steps_for(step_s: float, asked: int, there_are: int | None = None) -> int:
    """How many steps to measure, where one takes so long; no more than `there_are`, if the script has no more."""
    enough, most = int(MEASURED_S / max(step_s, 1e-6)) + 1, int(MOST_MEASURED_S / max(step_s, 1e-6))
    wanted = max(LEAST_STEPS, min(max(asked, min(enough, MOST_STEPS)), most))
    return wanted if there_are is None else min(wanted, there_are)


def step_time(took_s: Sequence[float]) -> float:
    """Mean seconds of a step; of many short ones, the median of the means of equal parts."""
    size = len(took_s) // PARTS
    if size < STEPS_OF_PART:
        return fmean(took_s)
    return median(fmean(took_s[start : start + size]) for start in range(0, PARTS * size, size))


def ways_for(facts: WorkerFacts, cores: int, given: Any = ()) -> tuple[list[Way], dict[str, str]]:
    """Ways to try with this run, and those that cannot be, with the reason. Flags that were `given` are not varied."""
    ways, untried = [Way("data for free", cause="data", removes=True)], dict[str, str]()
    if facts.workers == 1:
        untried["no exchange"] = "one worker exchanges nothing"
    elif facts.leases:
        untried["no exchange"] = "parameter servers lease the batches: without them a worker has nothing to compute"
    elif facts.divided:
        untried["no exchange"] = f"with {facts.strategy} each worker has a part of the model, and none can train alone"
    else:
        ways.append(Way("no exchange", cause="exchange", removes=True, alone=True))
    if facts.exact or "threads" in given:
        why = "results of an exact run depend on it" if facts.exact else "given as a flag"
        untried["other threads"] = why
    else:
        ways += [_with_threads(number) for number in _thread_counts(facts.threads, facts.workers, cores)]
    most = facts.most_loaders
    if most is not None and facts.loaders >= most:
        untried["one more loader process"] = {
            "memory": "the data is in memory",
            "thread": "a thread reads files and tensors ahead",
            "function": "the data is a function, and each worker has its own",
        }.get(facts.fetched_by, "a stream is read by one loader process")
    else:
        ways.append(_with_loaders(facts.loaders + 1))
    return ways, untried


def _thread_counts(threads: int, workers: int, cores: int) -> list[int]:
    more = [2 * threads] if threads * workers < cores or threads < cores else []
    fewer = [threads // 2] if threads > 1 else []
    return [number for number in [*fewer, *more] if number <= cores]


def _with_threads(number: int) -> Way:
    return Way(
        f"threads={number}",
        cause="computation",
        advice=f"mh run --threads {number}",
        flags={"launch.threads": number},
    )


def _with_loaders(number: int) -> Way:
    return Way(
        f"num_workers={number}",
        cause="data",
        advice=f"fit(..., num_workers={number}), or DataLoader(..., num_workers={number})",
        order={"loaders": number},
    )


def remedies_for(verdict: Verdict, facts: WorkerFacts, given: Any = ()) -> list[Way]:
    """What else to try, once it is known which costs count: settings that may reduce them."""
    found = []
    tried = {one.way.name for one in verdict.findings} | verdict.untried.keys()
    data, exchange = verdict.removed("data"), verdict.removed("exchange")
    if data is not None and data.is_clear:
        best = verdict.best_remedy("data")
        loaders = best.way.order.get("loaders", 0) if best is not None else 0
        if best is not None and data.saves - best.saves > data.noise and facts.most_loaders is None and loaders < 8:
            found.append(_with_loaders(2 * loaders))
    if exchange is not None and exchange.saves > exchange.noise:
        if facts.plane == "gloo" and "plane" not in given:
            advice = 'plane = "auto" under [comm]: shared memory between the workers of a host'
            found.append(Way("plane=auto", cause="exchange", advice=advice, flags={"comm.plane": "auto"}))
        allowed = LIMITS.get(facts.strategy, {}).get("comm.reducer")
        may_code = (allowed is None or "bf16" in allowed.allowed) and not facts.leases and not facts.exact
        if facts.reducer == "exact" and may_code and "reducer" not in given:
            changes = "gradients are rounded to bf16"
            found.append(
                Way(
                    "reducer=bf16",
                    cause="exchange",
                    advice="mh run --reducer bf16",
                    changes=changes,
                    flags={"comm.reducer": "bf16"},
                )
            )
    return [way for way in found if way.name not in tried]


class _Search:
    """Rounds of trials, and their results."""

    def __init__(self, runner: _Runner, rounds: int, say: Callable[[str], None], untried: Mapping[str, str]) -> None:
        self._runner, self._num_rounds, self._say = runner, rounds, say
        self._ways, self._rounds = list[Way](), list[Round]()
        self._untried = dict(untried)
        self.as_is: list[WorkerRecord] = []
        """Of the last trial of the script as it is."""

    @property
    def tried(self) -> set[str]:
        return {way.name for way in self._ways} | self._untried.keys()

    def try_all(self, ways: Sequence[Way]) -> Verdict:
        self._ways += ways
        for _ in range(self._num_rounds):
            self.try_again(ways)
        return self.verdict()

    def try_again(self, ways: Sequence[Way]) -> Verdict:
        """One more round."""
        before = self._as_is()
        left = [way for way in ways if way.name not in self._untried]
        shift = len(self._rounds) % max(1, len(left))  # or each would always follow the same one
        found = {way.name: one for way in left[shift:] + left[:shift] if (one := self._try(way)) is not None}
        self._rounds.append(Round(before, self._as_is(), found))
        return self.verdict()

    def _as_is(self) -> float:
        trial = self._runner.run(AS_IS)
        if trial.failed:
            raise self._runner.error(trial)
        self.as_is = trial.records
        if trial.steps is not None:  # the script has no more
            self._runner.steps = min(self._runner.steps, trial.steps)
        self._say(f"as it is: {1000 * trial.step_s:.1f} ms per step")
        return trial.step_s

    def _try(self, way: Way) -> float | None:
        trial = self._runner.run(way)
        if trial.failed:
            self._untried[way.name] = trial.failed
            self._say(f"{way.name}: {trial.failed}")
            return None
        self._say(f"{way.name}: {1000 * trial.step_s:.1f} ms per step")
        return trial.step_s

    def verdict(self) -> Verdict:
        facts = self._runner.facts
        ways = [way for way in self._ways if way.name not in self._untried]
        return judge(ways, self._rounds, self._untried, alone=facts is not None and facts.workers == 1)


class _Runner:
    """Runs the script in one way or another, from its start to the end of its last process."""

    def __init__(self, asked: Profiling) -> None:
        self._asked = asked
        self.flags: dict[str, Any] = {}
        """Settings by dotted key, beside those that were asked for."""
        self.facts: WorkerFacts | None = None
        self.steps = asked.steps
        self._failed: Failed | None = None
        self._output: list[str] = []

    def run(self, way: Way, steps: int | None = None) -> TrialTimes:
        steps = self.steps if steps is None else steps
        if way.alone:
            return self._run_alone(steps)
        order = ProfileOrder(**way.order)  # type: ignore[arg-type]
        if way.cause == "data" and way.removes:
            # Of batches that servers lease, more than `steps` are computed in the time that is measured.
            many = 4 if self.facts is not None and self.facts.leases else 1
            order = msgspec.structs.replace(order, data_ready=many * steps + WARM_UP_STEPS)
        with self._trial(order, way.flags) as trial:
            why = self._wait(trial, steps + WARM_UP_STEPS, lambda: _has_steps(trial.run_dir, steps))
            return self._result(read_records(trial.run_dir), steps, why)

    def _run_alone(self, steps: int) -> TrialTimes:
        """As many trials of one worker, at the same time, as the run has workers."""
        assert self.facts is not None
        workers = self.facts.workers
        flags = {
            "train.strategy": "single",
            "launch.workers": 1,
            "launch.servers": None,
            "launch.elastic": None,
            "launch.threads": self.facts.threads,
            "train.slices": self.facts.slices,
            "comm.reducer": "exact",
            "train.balance": False,
            "train.audit": False,
        }
        enough, aborted = threading.Barrier(workers), threading.Event()

        def one(rank: int, gate: str) -> TrialTimes:
            order = ProfileOrder(share=(rank, workers), start_gate=gate)
            with self._trial(order, flags) as trial:
                why = self._wait(trial, steps + WARM_UP_STEPS, lambda: _has_steps(trial.run_dir, steps), aborted)
                if why and not why.startswith(ENDED):
                    aborted.set()  # the others would wait for it
                    enough.abort()
                with contextlib.suppress(threading.BrokenBarrierError):
                    enough.wait(self._asked.wait_s)  # all go on until the last one has its steps
                return self._result(read_records(trial.run_dir), steps, why)

        with tempfile.TemporaryDirectory(prefix="manyhands-trial-") as gate, ThreadPoolExecutor(workers) as pool:
            try:
                trials = list(pool.map(partial(one, gate=gate), range(workers)))
            finally:  # also after Ctrl-C
                aborted.set()
                enough.abort()
        return next((trial for trial in trials if trial.failed), max(trials, key=lambda trial: trial.step_s))

    def trace(self) -> list[RecordedSteps]:
        """A few steps of the script as it is, recorded by torch's profiler; none if that did not work."""
        assert self.facts is not None
        order = ProfileOrder(trace=(WARM_UP_STEPS + 1, WARM_UP_STEPS + TRACED_STEPS))
        workers = self.facts.workers
        with self._trial(order, {}) as trial:
            paths = [trial.run_dir / TRACE_NAME.format(rank=rank) for rank in range(workers)]
            self._wait(trial, WARM_UP_STEPS + TRACED_STEPS, lambda: all(path.exists() for path in paths))
            return [msgspec.json.decode(path.read_bytes(), type=RecordedSteps) for path in paths if path.exists()]

    @contextlib.contextmanager
    def _trial(self, order: ProfileOrder, flags: Mapping[str, Any]) -> Iterator[RunningTrial]:
        asked = self._asked
        request = TrialRequest(
            command=asked.command,
            flags={**by_dotted_key(asked.flags), "comm.timeout_s": TIMEOUT_S, **self.flags, **flags},
            config_file=asked.config_file,
        )
        with run_trial(request, **{PROFILE_VARIABLE: msgspec.json.encode(order).decode()}) as trial:
            yield trial

    def _wait(
        self, trial: RunningTrial, least: int, is_done: Callable[[], bool], aborted: threading.Event | None = None
    ) -> str:
        """Wait until the trial `is_done`, after this many steps at the least; or else, the reason why it is not."""

        def until() -> float:
            if aborted is not None and aborted.is_set():
                return 0.0
            return min(give_up_at[0], time.monotonic() + LOOK_EVERY_S)

        give_up_at = [time.monotonic() + self._asked.wait_s]
        steps, ended, output = 0, False, list[str]()
        for report in trial.reports(until):
            match report:
                case StepDone():
                    if not steps:
                        give_up_at[0] = time.monotonic() + MOST_MEASURED_S + self._asked.wait_s
                    steps += 1
                    if steps >= least and is_done():
                        return ""
                case Failed() as failed:
                    self._failed = self._failed or failed
                    return clean(failed.reason)[:200]
                case Wrote(text=text):
                    output = [*output, *text.splitlines()][-LINES_KEPT:]
                case RunEnded():
                    ended = True
        self._output = output
        if ended or trial.has_ended:
            return f"{ENDED} after {steps} steps" if steps else NO_STEP
        return f"no step within {self._asked.wait_s:g} s" if not steps else "its steps take too long"

    def _result(self, records: list[WorkerRecord], steps: int, why: str) -> TrialTimes:
        chief = next((record for record in records if record.facts.rank == 0), None)
        leases = chief is not None and chief.facts.leases
        measured = chief.measured[: None if leases else steps] if chief is not None else []
        if len(measured) < LEAST_STEPS or (why and not why.startswith(ENDED)):
            return TrialTimes(0.0, records, why or "too few steps")
        ended = len(chief.measured) if chief is not None and why.startswith(ENDED) else None
        return TrialTimes(step_time([one.took_s for one in measured]), records, steps=ended)

    def error(self, trial: TrialTimes) -> errors.ManyhandsError:
        """For a script that cannot be measured as it is."""
        if self._failed is not None:
            kind = getattr(errors, self._failed.error, TrainingFailed)
            if self._failed.error:
                return kind(self._failed.details)
            return TrainingFailed(f"The script fails, so there is nothing to profile.\n{self._failed.details}")
        output = "".join(f"\n  {clean(line)}" for line in self._output)
        least = WARM_UP_STEPS + LEAST_STEPS
        what = f"The script cannot be measured: {trial.failed}."
        if trial.failed.startswith(ENDED):
            what = f"{what[:-1]}, and at least {least} are needed."
        see = f"mh run {self._asked.command.target}, to see what it does"
        fix = [see, f"--wait {2 * self._asked.wait_s:g}, if its start takes long"]
        if trial.failed == NO_STEP:
            fix = [see, *WAYS_TO_TRAIN]
        elif trial.failed.startswith(ENDED):
            fix = [see, "more epochs, for this one run"]
        return TrainingFailed(what + (f" Its last output:{output}" if output else ""), fix=fix)


def _has_steps(run_dir: Path, steps: int) -> bool:
    """Whether each worker has taken so many. Updates by servers come in bursts: these are measured by time, too."""
    records = read_records(run_dir)
    return bool(records) and all(
        len(record.measured) >= steps
        and (not record.facts.leases or sum(step.took_s for step in record.measured) >= MEASURED_S)
        for record in records
    )


def _times_of(record: WorkerRecord) -> WorkerTimes:
    steps = record.measured
    took_s = sum(step.took_s for step in steps) / max(1, len(steps))
    slices = sum(step.slices for step in steps) / max(1, len(steps))
    return WorkerTimes(record.facts.rank, took_s, mean_phases(steps), slices)


def _waiting(records: Sequence[WorkerRecord]) -> Mapping[tuple[int, int], float]:
    """By the chief's record: all ranks know the times of all."""
    return waiting_by_peer(records[0].measured) if records else {}
