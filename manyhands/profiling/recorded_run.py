"""What the record of a run says about its bottleneck, without any trial; without torch.

The times are those that every step records (`phase_timer`). They show where a step's time went, not what a step would
take without it: for that, `mh profile` runs trials. Start reading at `read_run_times` and `times_of`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from manyhands.errors import UsageError
from manyhands.events import Event, ResourcesUsed, RunStarted, StepDone
from manyhands.observe.event_text import size, slow_line
from manyhands.observe.recorder import read_events
from manyhands.observe.run_status import look_at

__all__ = ["CAUSES", "RecordedTimes", "WorkerUse", "read_run_times", "slice_line", "times_of"]

CAUSES = {
    "data": ("load",),
    "exchange": ("reduce",),
    "computation": ("forward", "backward", "update"),
    "other": ("gc", "other"),
}
"""The phases that belong to each cause."""
OF_A_SLICE = ("load", "forward", "backward")
"""The phases that a worker has for each of its slices; it reduces and updates once per step."""
MOST_STEPS = 2000
"""The last steps that are looked at."""


class WorkerUse(msgspec.Struct, frozen=True):
    rank: int
    phases: dict[str, float]
    """Mean seconds of a step in each phase."""
    cores: float
    """Cores that it kept busy."""
    bytes_per_step: float
    """Handed over to other workers and servers, also within the memory of a host."""
    slices_per_step: float = 0.0
    """Slices that it computed; 0: not recorded."""


class RecordedTimes(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    state: str
    strategy: str
    workers: int
    threads: int
    steps: int
    """Of the last call, how many the times are the mean of; the first three are left out."""
    step_s: float
    phases: dict[str, float]
    """Mean seconds of the chief's step in each phase, and in "other" what is in none."""
    shares: dict[str, float]
    """Of the slowest worker's step, by cause."""
    holds_back: str
    each: list[WorkerUse]
    slow: list[str]
    """Workers that were slower than the others."""
    command: list[str]

    def text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        split = f"{_many(self.workers, 'worker')} x {_many(self.threads, 'thread')}, {self.strategy}"
        yield f"{self.path} ({self.state}): {split}; {1000 * self.step_s:.1f} ms per step, over {self.steps} steps"
        shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in self.shares.items())
        yield f"held back by {self.holds_back}, as its steps were timed: {shares}"
        names = list(dict.fromkeys(name for one in self.each for name in one.phases)) or list(self.phases)
        yield "  ".join(["worker", *(name.ljust(11) for name in names), "cores busy", "given per step"])
        for one in self.each:
            times = (f"{1000 * one.phases.get(name, 0.0):.1f} ms".ljust(11) for name in names)
            yield "  ".join([str(one.rank).ljust(6), *times, f"{one.cores:.2f}".ljust(10), size(one.bytes_per_step)])
        if not self.each:
            times = (f"{1000 * self.phases.get(name, 0.0):.1f} ms".ljust(11) for name in names)
            yield "  ".join(["chief ", *times])
        yield from filter(None, (slice_line(one.rank, one.slices_per_step, one.phases) for one in self.each))
        yield from self.slow
        yield "reduce has the wait for slower workers in it; what a step would take without a cost, trials show:"
        yield "  mh profile train.py"


def read_run_times(path: Path) -> RecordedTimes:
    status = look_at(path, ask=False)
    found = times_of([read_events(file) for file in sorted((path / "events").glob("*.jsonl"))])
    if found is None:
        raise UsageError(
            f"{path} has no step on record, so nothing shows what holds it back.",
            where=str(path),
            fix=[f"mh status {path}", "mh profile train.py"],
        )
    slow = [slow_line(one) for one in status.slow]
    return msgspec.structs.replace(found, path=str(path), state=status.state, slow=slow, command=status.command)


def times_of(files: Iterable[Iterable[Event]], warm_up: int = 3) -> RecordedTimes | None:
    """The times of the last steps on record; None if there are none.

    `files` are the record's, in any order: the chief and the agent of each host write one each. Only within a file does
    the order of events mean something: clocks of hosts differ.
    """
    last_call, used = _Call(None, []), list[ResourcesUsed]()
    for file in files:
        call, last_used = _read_file(file)
        last_call = call if call.steps else last_call
        used += last_used
    every = [step for step in last_call.steps if step.training == last_call.steps[-1].training]
    steps = (every[warm_up:] if len(every) > 2 * warm_up else every)[-MOST_STEPS:]
    if not steps:
        return None
    started, step_s = last_call.started, sum(step.took_s for step in steps) / len(steps)
    phases = _means(steps, step_s)
    each = [_use(one) for one in _of_call(used, every[0])]
    shares = _shares(each, phases, step_s)
    return RecordedTimes(
        path="",
        state="",
        strategy=started.strategy if started else "",
        workers=started.workers if started else 1,
        threads=started.threads if started else 1,
        steps=len(steps),
        step_s=step_s,
        phases=phases,
        shares=shares,
        holds_back=max(shares, key=lambda cause: shares[cause]),
        each=each,
        slow=[],
        command=[],
    )


class _Call(NamedTuple):
    """The last call of `fit`, or the last attempt at it, that a file has."""

    started: RunStarted | None
    steps: list[StepDone]


def _read_file(file: Iterable[Event]) -> tuple[_Call, list[ResourcesUsed]]:
    """With the last report of each worker that writes to this file."""
    call, used = _Call(None, []), dict[tuple[int, int], ResourcesUsed]()
    for event in file:
        match event:
            case RunStarted():
                call = _Call(event, [])
            case StepDone():
                call.steps.append(event)
            case ResourcesUsed():
                used[event.training, event.rank] = event
    return call, list(used.values())


def _of_call(used: Iterable[ResourcesUsed], first: StepDone) -> list[ResourcesUsed]:
    """By rank, the reports of the call that began with the step `first`; if two hosts have one, the later.

    A report of an attempt before it, by a worker that is lost, counts more steps than there were since `first`.
    """
    found: dict[int, ResourcesUsed] = {}
    for one in used:
        if one.training == first.training and one.step >= first.step:
            known = found.setdefault(one.rank, one)
            found[one.rank] = max(known, one, key=lambda report: _key(report, first))
    return [found[rank] for rank in sorted(found)]


def _key(used: ResourcesUsed, first: StepDone) -> tuple[bool, int]:
    return used.steps <= used.step - first.step + 1, used.step


def _means(steps: list[StepDone], step_s: float) -> dict[str, float]:
    names = list(dict.fromkeys(name for step in steps for name in step.phases))
    means = {name: sum(step.phases.get(name, 0.0) for step in steps) / len(steps) for name in names}
    means["other"] = max(0.0, step_s - sum(means.values()))
    return means


def _use(event: ResourcesUsed) -> WorkerUse:
    steps = max(1, event.steps)
    return WorkerUse(
        rank=event.rank,
        phases={name: seconds / steps for name, seconds in event.phases.items()},
        cores=event.cpu_s / event.seconds if event.seconds > 0 else 0.0,
        bytes_per_step=max(event.handed_over, event.bytes_sent) / steps,  # earlier records have only what was sent
        slices_per_step=event.slices / steps,
    )


def slice_line(rank: int, slices: float, phases: Mapping[str, float]) -> str:
    """A worker's seconds of one slice; empty where it is not known how many it computed."""
    if not slices:
        return ""
    times = (f"{name} {1000 * phases.get(name, 0.0) / slices:.1f} ms" for name in OF_A_SLICE)
    return f"worker {rank}, per slice ({slices:g} a step): {', '.join(times)}"


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _shares(each: list[WorkerUse], chief: dict[str, float], step_s: float) -> dict[str, float]:
    """Of the worker that waits least: what it does is what the others wait for."""
    least = min(each, key=lambda one: one.phases.get("reduce", 0.0), default=None)
    phases = {**least.phases, "other": chief.get("other", 0.0)} if least is not None and len(each) > 1 else chief
    total = max(sum(phases.values()), 1e-12)
    return {cause: sum(phases.get(name, 0.0) for name in names) / total for cause, names in CAUSES.items()}
