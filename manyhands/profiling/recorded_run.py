"""What the record of a run says about its bottleneck, without any trial; without torch.

The times are those that every step records (`phase_timer`). They show where a step's time went, not what a step would
take without it: for that, `mh profile` runs trials. Start reading at `read_run_times` and `times_of`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from manyhands.errors import UsageError
from manyhands.events import Event, ResourcesUsed, RunStarted, StepDone, Straggler
from manyhands.observe.event_text import size, slow_line
from manyhands.observe.recorder import read_events
from manyhands.observe.run_status import look_at

__all__ = ["CAUSES", "RecordedTimes", "WorkerUse", "read_run_times", "times_of"]

CAUSES = {
    "data": ("load",),
    "exchange": ("reduce",),
    "computation": ("forward", "backward", "update"),
    "other": ("gc", "other"),
}
"""The phases that belong to each cause."""
MOST_STEPS = 2000
"""The last steps that are looked at."""


class WorkerUse(msgspec.Struct, frozen=True):
    rank: int
    phases: dict[str, float]
    """Mean seconds of a step in each phase."""
    cores: float
    """Cores that it kept busy."""
    bytes_per_step: float


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
        split = f"{self.workers} worker{'s' * (self.workers != 1)} x {self.threads} threads, {self.strategy}"
        yield f"{self.path} ({self.state}): {split}; {1000 * self.step_s:.1f} ms per step, over {self.steps} steps"
        shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in self.shares.items())
        yield f"held back by {self.holds_back}, as its steps were timed: {shares}"
        names = list(dict.fromkeys(name for one in self.each for name in one.phases)) or list(self.phases)
        yield "  ".join(["worker", *(name.ljust(11) for name in names), "cores busy", "sent per step"])
        for one in self.each:
            times = (f"{1000 * one.phases.get(name, 0.0):.1f} ms".ljust(11) for name in names)
            yield "  ".join([str(one.rank).ljust(6), *times, f"{one.cores:.2f}".ljust(10), size(one.bytes_per_step)])
        if not self.each:
            times = (f"{1000 * self.phases.get(name, 0.0):.1f} ms".ljust(11) for name in names)
            yield "  ".join(["chief ", *times])
        yield from self.slow
        yield "reduce has the wait for slower workers in it; what a step would take without a cost, trials show:"
        yield "  mh profile train.py"


def read_run_times(path: Path) -> RecordedTimes:
    status = look_at(path, ask=False)
    events = (event for file in sorted((path / "events").glob("*.jsonl")) for event in read_events(file))
    found = times_of(events)
    if found is None:
        raise UsageError(
            f"{path} has no step on record, so nothing shows what holds it back.",
            where=str(path),
            fix=[f"mh status {path}", "mh profile train.py"],
        )
    slow = [slow_line(one) for one in status.slow]
    return msgspec.structs.replace(found, path=str(path), state=status.state, slow=slow, command=status.command)


def times_of(events: Iterable[Event], warm_up: int = 3) -> RecordedTimes | None:
    """The times of the last steps on record; None if there are none."""
    started: RunStarted | None = None
    steps, used = list[StepDone](), dict[int, ResourcesUsed]()
    for event in events:
        match event:
            case RunStarted():
                started, steps, used = event, [], {}
            case StepDone():
                steps.append(event)
            case ResourcesUsed():
                used[event.rank] = event
            case Straggler():
                pass
    steps = (steps[warm_up:] if len(steps) > 2 * warm_up else steps)[-MOST_STEPS:]
    if not steps:
        return None
    step_s = sum(step.took_s for step in steps) / len(steps)
    phases = _means(steps, step_s)
    each = [_use(one) for _, one in sorted(used.items())]
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
        bytes_per_step=event.bytes_sent / steps,
    )


def _shares(each: list[WorkerUse], chief: dict[str, float], step_s: float) -> dict[str, float]:
    """Of the worker that waits least: what it does is what the others wait for."""
    least = min(each, key=lambda one: one.phases.get("reduce", 0.0), default=None)
    phases = {**least.phases, "other": chief.get("other", 0.0)} if least is not None and len(each) > 1 else chief
    total = max(sum(phases.values()), 1e-12)
    return {cause: sum(phases.get(name, 0.0) for name in names) / total for cause, names in CAUSES.items()}
