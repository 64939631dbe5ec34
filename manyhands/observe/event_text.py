"""A run's events as text for people: pure functions and one running summary of steps; nothing here prints.

`line_of` formats the events that get one line each. Steps do not: there are thousands, so `Tally` sums them up and
formats the sum.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from manyhands.events import (
    CheckpointEvaluated,
    CheckpointFailed,
    CheckpointSaved,
    Divided,
    EpochDone,
    Evaluated,
    Event,
    GenerationStarted,
    LaunchStarted,
    Logged,
    PipelineTimed,
    ResourcesUsed,
    Resumed,
    RoundRestarted,
    RoundsClosed,
    RunEnded,
    RunStarted,
    ServerLost,
    StalenessSeen,
    StepDone,
    Straggler,
    Validated,
    Warned,
    WorkerLost,
)

__all__ = [
    "PHASES_OF_MEMORY",
    "Tally",
    "clean",
    "count",
    "details_of",
    "duration",
    "evaluated_beside",
    "line_of",
    "results",
    "size",
    "slow_line",
    "used_lines",
    "waiting_line",
]

PHASES = ("load", "forward", "backward", "reduce", "update", "gc")
PHASES_OF_MEMORY = {"start": "at the start", "step": "in a step", "save": "in a save"}
MAX_WORKERS_SHOWN = 8
LONG_IMPORT_S = 15.0


class Tally:
    """Steps since the last line: where training is, how fast, and how the time was spent."""

    def __init__(self) -> None:
        self.step = 0
        self.epoch = 0
        self.loss = math.nan
        self.total_steps: int | None = None
        self.fresh = False
        """Whether a step has not been displayed yet; the display resets it."""
        self._given_eta_s: float | None = None
        self._steps = self._rows = self._seconds = 0.0
        self._phases: dict[str, float] = {}
        self._stale: float | None = None

    def add(self, event: StepDone) -> None:
        self.step, self.epoch, self.loss, self.fresh = event.step, event.epoch, event.loss, True
        self.total_steps = event.total_steps or self.total_steps
        self._given_eta_s = event.eta_s
        self._steps += 1
        if event.samples_per_s > 0:
            self._rows += event.rows
            self._seconds += event.rows / event.samples_per_s
        for phase, seconds in event.phases.items():
            self._phases[phase] = self._phases.get(phase, 0.0) + seconds
        if event.staleness is not None:
            self._stale = (self._stale or 0.0) + event.staleness

    def forget(self, share: float = 1.0) -> None:
        """Drop this share of the past: 1 starts a new interval, less at regular times makes a moving average."""
        self._steps, self._rows, self._seconds = (
            kept * (1 - share) for kept in (self._steps, self._rows, self._seconds)
        )
        self._phases = {phase: seconds * (1 - share) for phase, seconds in self._phases.items()}
        self._stale = None if self._stale is None else self._stale * (1 - share)

    @property
    def samples_per_s(self) -> float:
        return self._rows / self._seconds if self._seconds else 0.0

    @property
    def eta_s(self) -> float | None:
        if self._given_eta_s is not None or self.total_steps is None or not self._steps or not self._seconds:
            return self._given_eta_s
        return max(self.total_steps - self.step, 0) * self._seconds / self._steps

    def where(self) -> str:
        return f"step {self.step}/{self.total_steps}" if self.total_steps else f"step {self.step}"

    def speed(self) -> list[str]:
        parts = [f"epoch {self.epoch + 1}", f"loss {_number(self.loss)}", f"{count(self.samples_per_s)} samples/s"]
        if self._stale is not None and self._steps:
            parts.append(f"staleness {self._stale / self._steps:.1f}")
        return parts if not self.eta_s else [*parts, f"eta {duration(self.eta_s)}"]

    def shares(self) -> str:
        return shares(self._phases)

    def line(self) -> str:
        *speed, last = self.speed()
        parts = [*speed, self.shares(), last] if last.startswith("eta ") else [*speed, last, self.shares()]
        return "  ".join(part for part in (self.where(), *parts) if part)


def shares(phases: Mapping[str, float]) -> str:
    """Seconds by phase as shares of their sum."""
    total = sum(phases.values())
    if not total:
        return ""
    known = [phase for phase in PHASES if phase in phases]
    others = [phase for phase in phases if phase not in PHASES]
    return " ".join(f"{clean(phase)} {100 * phases[phase] / total:.0f}%" for phase in known + others)


def used_lines(workers: Iterable[ResourcesUsed]) -> list[str]:
    """Resources used by each worker; for many workers, the range."""
    by_rank = sorted(workers, key=lambda one: one.rank)
    if len(by_rank) > MAX_WORKERS_SHOWN:
        return [f"{len(by_rank)} workers: {_used(by_rank)}"]
    return [f"rank {one.rank}: {_used([one])}" for one in by_rank]


def _used(workers: Sequence[ResourcesUsed]) -> str:
    """Cores, memory and link of one worker, or the range over several; and how their time was spent."""
    cores = _span([one.cpu_s / one.seconds for one in workers if one.seconds > 0], "{:.2f}".format)
    parts = [f"{cores} cores", f"{_span([one.peak_rss_bytes for one in workers], size)} at most"]
    if predictions := [one.predicted_bytes for one in workers if one.predicted_bytes is not None]:
        most = max(workers, key=lambda one: one.predicted_bytes or 0)
        parts[-1] += f" ({_span(predictions, size)} predicted, {PHASES_OF_MEMORY[most.predicted_phase]})"
    if own := [one.pss_bytes for one in workers if one.pss_bytes is not None]:
        parts.append(f"{_span(own, size)} with shared pages divided")
    if any(one.bytes_sent for one in workers):
        each_step = _span([one.bytes_sent / one.steps for one in workers if one.steps], size)
        each_second = _span([one.bytes_sent / one.seconds for one in workers if one.seconds > 0], size)
        parts.append(f"sent {each_step} a step, {each_second} a second")
    phases: dict[str, float] = {}
    for one in workers:
        for phase, seconds in one.phases.items():
            phases[phase] = phases.get(phase, 0.0) + seconds
    return ", ".join(parts) + (f"; {shares(phases)}" if shares(phases) else "")


def _span(values: Sequence[float], text_of: Callable[[float], str]) -> str:
    if not values:
        return "?"
    least, most = text_of(min(values)), text_of(max(values))
    return least if least == most else f"{least} to {most}"


def line_of(event: Event, *, elapsed_s: float | None = None) -> str | None:
    """One line for people, or None for an event that has none. Lines of later trainings begin with their number."""
    line, training = _line_of(event, elapsed_s=elapsed_s), getattr(event, "training", 1)
    return f"training {training}: {line}" if line is not None and training > 1 else line


def _line_of(event: Event, *, elapsed_s: float | None) -> str | None:
    match event:
        case LaunchStarted():
            return f"starting {_processes(event)}, importing torch …"
        case RunStarted():
            return _started(event)
        case GenerationStarted():
            where = f"on {_many(event.hosts, 'host')} (generation {event.generation})"
            return f"continuing with {_many(event.workers, 'worker')} {where}"
        case Straggler(is_over=True):
            return f"rank {event.rank} on {clean(event.host)} keeps up with the others again"
        case Straggler():
            return slow_line(event)
        case Divided():
            return _divided(event)
        case PipelineTimed():
            bubble = f"bubble {event.measured:.0%} in step {event.step}, {event.theory:.0%} in theory"
            return f"pipeline {event.schedule}, {event.microbatches} microbatches: {bubble}; {event.path}"
        case StalenessSeen() if event.updates:
            counts = ", ".join(f"{stale}: {updates}" for stale, updates in sorted(event.updates.items()))
            return f"updates by the staleness of their gradients: {counts}"
        case RoundsClosed():
            counts = ", ".join(f"{workers}: {rounds}" for workers, rounds in sorted(event.rounds.items()))
            return f"averaging rounds by their number of workers: {counts}"
        case EpochDone():
            found = {name: value for name, value in event.results.items() if name not in ("epoch", "step")}
            return f"epoch {event.epoch + 1} done at step {event.step}  {results(found)}".rstrip()
        case Validated():
            found = {name: value for name, value in event.results.items() if name not in ("epoch", "step")}
            what = "validated at" if any(name.startswith("val_") for name in found) else "trained to"
            return f"{what} step {event.step}  {results(found)}".rstrip()
        case Evaluated():
            return f"evaluated {_many(event.rows, 'example')} at step {event.step}  {results(event.results)}".rstrip()
        case CheckpointEvaluated():
            return f"checkpoint of step {event.step}  {evaluated_beside(event)}"
        case Logged():
            return f"logged at step {event.step}  {results(event.values)}".rstrip()
        case CheckpointSaved():
            return f"saved checkpoint of step {event.step} ({size(event.num_bytes)} in {event.seconds:.2g} s)"
        case CheckpointFailed():
            known = f"of step {event.step} " in event.reason  # most reasons are complete sentences that say so
            return f"warning: {'' if known else f'checkpoint of step {event.step} not saved: '}{clean(event.reason)}"
        case Resumed():
            skipped = "".join(f"; skipped {clean(what)}" for what in event.skipped)
            return f"resumed at step {event.step}, epoch {event.epoch + 1}, from {clean(event.path)}{skipped}"
        case RoundRestarted():
            return f"averaging round restarted after step {event.step}: {_many(event.steps, 'step')} rolled back"
        case WorkerLost(collateral=False):
            return f"lost rank {event.rank} on {clean(event.host)} (pid {event.pid}): {clean(event.reason)}"
        case ServerLost():
            return f"lost server {event.server} on {clean(event.host)} (pid {event.pid}): {clean(event.reason)}"
        case Warned():
            return f"warning: {clean(event.text)}"
        case RunEnded():
            return _ended(event, elapsed_s)
    return None


def evaluated_beside(event: CheckpointEvaluated) -> str:
    """The results of an evaluation beside the training, and the throughput of both."""
    speed = f"{_many(event.rows, 'example')}, {count(event.rows / max(event.seconds, 1e-9))} a second"
    beside = ""
    if event.step_s is not None:
        beside = f"; training's steps take {_brief(event.step_s)} meanwhile"
        beside += f", {_brief(event.step_alone_s)} otherwise" if event.step_alone_s is not None else ""
    return f"{results(event.results)}  ({speed}{beside})"


def _brief(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def slow_line(event: Straggler) -> str:
    who = f"rank {event.rank} on {clean(event.host)}"
    waiting = f"; they wait {100 * event.waiting:.0f}% of a step" if event.waiting >= 0.005 else ""
    return f"{who} is {event.factor:.1f} times as slow as the others, in {clean(event.phase)}{waiting}"


def _divided(event: Divided) -> str:
    parts = " ".join(map(str, event.slices))
    if len(event.slices) > MAX_WORKERS_SHOWN:
        parts = f"{min(event.slices)} to {max(event.slices)} a worker"
    return f"slices per worker from step {event.step + 1} on: {parts}, in proportion to their speed"


def waiting_line(event: LaunchStarted, seconds: float) -> str:
    """For a terminal, until the first message from the workers."""
    if seconds < LONG_IMPORT_S:
        return f"starting {_processes(event)}, importing torch … {seconds:.0f} s"
    return f"{_processes(event)} started; nothing from the script yet … {duration(seconds)}"


def _processes(event: LaunchStarted) -> str:
    servers = f" and {_many(event.servers, 'parameter server')}" if event.servers else ""
    return f"{_many(event.workers, 'worker')}{servers}"


def _started(event: RunStarted) -> str:
    """For users who know nothing of manyhands: how many workers do what, and where the run directory is."""
    does = "trains" if event.workers == 1 else "train together"
    if event.call != "fit":
        does = f"at work ({event.call})"
    strategy = f" ({event.strategy})" if event.workers > 1 else ""
    parts = [f"{_many(event.workers, 'worker')} {does}{strategy}"]
    if event.total_steps:
        parts.append(_many(event.total_steps, "step"))
    if event.attempt > 1:
        parts.append(f"attempt {event.attempt}")
    if slower := re.search(r"workers talk over \w+ \(.*\)", event.machine):
        parts.append(slower[0])  # why shared memory is not used: it costs speed
    return clean(f"{', '.join(parts)}; everything is written to {event.run}")


def details_of(event: RunStarted) -> str:
    """The details for `--verbose`: what results and speed depend on."""
    parts = [
        event.strategy,
        f"V={event.slices}",
        event.precision,
        f"{_many(event.threads, 'thread')} each",
        *([event.machine] if event.machine else []),
    ]
    data = f"; data: {event.data}" if event.data else ""
    return clean(f"{', '.join(parts)}{data}")


def _ended(event: RunEnded, elapsed_s: float | None) -> str:
    ending = "finished" if event.exit_code == 0 else f"ended with exit code {event.exit_code}"
    after = "" if elapsed_s is None else f" after {duration(elapsed_s)}"
    because = f": {clean(event.reason)}" if event.exit_code and event.reason else ""
    missing = f" ({_many(event.dropped, 'event')} not recorded)" if event.dropped else ""
    where = "" if elapsed_s is None and not event.step else f" at step {event.step}"  # a script without manyhands
    return f"{ending}{where}{after}{because}{missing}"


def results(values: Mapping[str, float]) -> str:
    return "  ".join(f"{clean(name)} {_number(value)}" for name, value in values.items())


def duration(seconds: float) -> str:
    """The two largest units: 7s, 41m, 3h12m, 2d4h."""
    if not math.isfinite(seconds):
        return "?"
    whole = round(max(seconds, 0))
    if whole < 60:
        return f"{whole}s"
    if whole < 600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = round(whole / 60)
    if minutes < 60:
        return f"{minutes}m"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 24 else f"{hours // 24}d{hours % 24}h"


def size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def count(value: float) -> str:
    """A rate with three significant digits or all integer digits: 312, 4.27, 15300."""
    return f"{value:.0f}" if value >= 100 or not math.isfinite(value) else f"{value:.3g}"


def clean(text: str) -> str:
    """Foreign text on one line, without control characters that move a terminal's cursor or change its colours."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _number(value: float) -> str:
    return f"{value:.4g}"


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
