"""What became of each fault, and of the run: strikes and events in, a report out. Pure.

Times are those of one host's clock: the strikes', the agent's and the chief's. A worker's loss is detected when its
agent records it. It is recovered from when the first step is committed by a generation that began after that: a step
in flight that others finish without the lost worker proves nothing. A server's loss is recovered from with the first
update that the next process with its number makes. Start reading at `judge`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from manyhands.chaos.fault_injection import Strike
from manyhands.chaos.fault_schedule import ON_SERVERS, ON_WORKERS
from manyhands.events import (
    CheckpointFailed,
    CheckpointSaved,
    Event,
    GenerationStarted,
    RunEnded,
    RunStarted,
    ServerLost,
    ServerWentOn,
    StepDone,
    Warned,
    WorkerLost,
)
from manyhands.observe.run_audit import Ledger, audit, generation_key

Kind = TypeVar("Kind", bound=Event)

__all__ = ["Outcome", "Report", "Weights", "judge"]


class Outcome(msgspec.Struct, kw_only=True):
    """One fault and what became of it. Seconds are from the strike; None: it never happened."""

    number: int
    kind: str
    who: str
    at_s: float
    """After the run's first committed step."""
    detected_s: float | None = None
    recovered_s: float | None = None
    steps_lost: int = 0
    note: str = ""
    skipped: bool = False

    @property
    def is_bad(self) -> bool:
        return not self.skipped and self.recovered_s is None


class Weights(msgspec.Struct, kw_only=True):
    """The last checkpoints of both runs, compared bit for bit: weights, buffers, the optimizer's state."""

    step: int
    reference_step: int
    tensors: int
    different: list[str]
    """Names of tensors that differ, or that only one of them has."""

    @property
    def same_step(self) -> bool:
        return self.step == self.reference_step and self.tensors > 0

    @property
    def equal(self) -> bool:
        return self.same_step and not self.different


class Report(msgspec.Struct, kw_only=True):
    exit_code: int
    """Of the run itself."""
    exact: bool
    """The script asked for exact=True: only then are equal weights promised."""
    mode: str = ""
    """Of parameter servers: "sync", "ssp" or "async"."""
    scheduled: int
    """Faults; those whose time did not come, because the run was over, are not among the outcomes."""
    outcomes: list[Outcome]
    ledger: Ledger
    seconds: float
    """From the first committed step until faults were over, or the run was."""
    steps: int
    """Committed in that time."""
    recovering_s: float
    goodput: float | None = None
    """Steps committed in that time, over those of the undisturbed run in as much."""
    weights: Weights | None = None

    @property
    def expects_equal(self) -> bool:
        """Where gradients are applied as they come, no two runs end with the same weights."""
        return self.mode not in ("ssp", "async")

    @property
    def passed(self) -> bool:
        """A run that nothing struck has shown nothing."""
        struck = self.scheduled == 0 or any(not one.skipped for one in self.outcomes)
        well = self.exit_code == 0 and not self.ledger.problems and not any(one.is_bad for one in self.outcomes)
        return struck and well and self._weights_are_well

    @property
    def _weights_are_well(self) -> bool:
        if self.weights is None:
            return True
        return self.weights.equal if self.expects_equal else self.weights.same_step


def judge(
    strikes: Sequence[Strike],
    events: Sequence[Event],
    reference: Sequence[Event],
    *,
    exit_code: int,
    scheduled: int,
    minutes: float,
    weights: Weights | None = None,
) -> Report:
    commits = _commits(events)
    first_s = commits[0].time_s if commits else 0.0
    ledger = audit(events)
    outcomes = [_outcome(struck, events, commits, first_s) for struck in strikes]
    _blame(outcomes, ledger, commits, first_s)
    last_recovery_s = max((one.at_s + (one.recovered_s or 0.0) for one in outcomes), default=0.0)
    ended_s = commits[-1].time_s - first_s if commits else 0.0
    window_s = min(ended_s, max(60.0 * minutes, last_recovery_s))
    steps = _steps_until(commits, first_s + window_s)
    speed, of_reference = _speed(steps, window_s), _speed_of(_commits(reference))
    return Report(
        exit_code=exit_code,
        exact=any(event.exact for event in events if isinstance(event, RunStarted)),
        mode=next((event.mode for event in events if isinstance(event, RunStarted) and event.mode), ""),
        scheduled=scheduled,
        outcomes=outcomes,
        ledger=ledger,
        seconds=window_s,
        steps=steps,
        recovering_s=_covered(_standstills(outcomes)),
        goodput=speed / of_reference if of_reference else None,
        weights=weights,
    )


def _commits(events: Sequence[Event]) -> list[StepDone]:
    """In order of time; files overlap, and tell some of them twice."""
    unique = {(event.generation, event.step, event.time_s): event for event in events if isinstance(event, StepDone)}
    return sorted(unique.values(), key=lambda event: event.time_s)


def _steps_until(commits: Sequence[StepDone], time_s: float) -> int:
    """How far the run had come from its first step by then; steps that were made twice count once."""
    done = [commit.step for commit in commits if commit.time_s <= time_s]
    return done[-1] - done[0] if done else 0


def _speed(steps: int, seconds: float) -> float:
    return steps / seconds if seconds > 0 else 0.0


def _speed_of(commits: Sequence[StepDone]) -> float:
    if not commits:
        return 0.0
    return _speed(commits[-1].step - commits[0].step, commits[-1].time_s - commits[0].time_s)


def _outcome(struck: Strike, events: Sequence[Event], commits: Sequence[StepDone], first_s: float) -> Outcome:
    fault, began = struck.fault, struck.time_s
    outcome = Outcome(number=fault.number, kind=fault.kind, who=struck.who, at_s=began - first_s)
    if struck.skipped:
        outcome.skipped, outcome.note = True, struck.skipped
        return outcome
    match fault.kind:
        case "coordinator":
            detected = _first(one for one in _after(events, Warned, began) if "coordinator" in one.text)
            recovered = None if detected is None else _first(_after(commits, StepDone, detected))
        case "disk":
            detected, recovered = _disk(struck, events, outcome)
        case "slow":
            detected, recovered = None, _first(_after(commits, StepDone, began))
            outcome.note = _slow_note(struck, events, commits)
        case "agent":
            detected = _first(one for one in _after(events, GenerationStarted, began) if _is_without(one, struck))
            recovered = _next_commit_after_loss(detected, events, commits)
        case "kill-server" | "stop-server":
            detected = _first(one for one in _after(events, ServerLost, began) if one.pid == struck.pid)
            recovered = None if detected is None else _first(_went_on(struck, events, detected))
        case _:
            detected = _loss(struck, events)
            recovered = _next_commit_after_loss(detected, events, commits)
    if recovered is None and (end := _well_ended(events, began)) is not None:
        recovered = end
        outcome.note = outcome.note or "the run ended first, and well"
    outcome.detected_s = None if detected is None else detected - began
    outcome.recovered_s = None if recovered is None else recovered - began
    return outcome


def _after(events: Iterable[Event], kind: type[Kind], time_s: float) -> list[Kind]:
    found = [event for event in events if isinstance(event, kind) and event.time_s >= time_s]
    return sorted(found, key=lambda event: event.time_s)


def _first(events: Iterable[Event]) -> float | None:
    return next((event.time_s for event in events), None)


def _loss(struck: Strike, events: Sequence[Event]) -> float | None:
    return _first(one for one in _after(events, WorkerLost, struck.time_s) if one.pid == struck.pid)


def _went_on(struck: Strike, events: Sequence[Event], since_s: float) -> list[ServerWentOn]:
    return [one for one in _after(events, ServerWentOn, since_s) if one.server == struck.slot]


def _is_without(started: GenerationStarted, struck: Strike) -> bool:
    """Whether this generation began because one of these is gone; nobody is left to record the loss of each."""
    return any(f"(pid {pid})" in started.why for pid in struck.others)


def _slow_note(struck: Strike, events: Sequence[Event], commits: Sequence[StepDone]) -> str:
    assert struck.until_s is not None
    lost_s = _loss(struck, events)
    if lost_s is not None and lost_s < struck.until_s:
        return "the worker was lost meanwhile"
    steps = sum(struck.time_s <= commit.time_s < struck.until_s for commit in commits)
    return f"{steps} steps in its {struck.fault.lasts_s:g} s"


def _next_commit_after_loss(lost_s: float | None, events: Sequence[Event], commits: Sequence[StepDone]) -> float | None:
    if lost_s is None:
        return None
    newer = _after(events, GenerationStarted, lost_s)
    if not newer:
        return None
    least = generation_key(newer[0].generation)
    return _first(commit for commit in commits if generation_key(commit.generation) >= least)


def _disk(struck: Strike, events: Sequence[Event], outcome: Outcome) -> tuple[float | None, float | None]:
    """Noticed when a checkpoint fails, over when one is committed again; if none was due, when training goes on."""
    assert struck.until_s is not None
    failed = _first(_after(events, CheckpointFailed, struck.time_s))
    if failed is None or failed >= struck.until_s:  # a later one is another fault's
        outcome.note = "no checkpoint was due meanwhile"
        return None, _first(_after(events, StepDone, struck.time_s))
    return failed, _first(_after(events, CheckpointSaved, struck.until_s))


def _well_ended(events: Sequence[Event], since_s: float) -> float | None:
    return _first(one for one in _after(events, RunEnded, since_s) if one.exit_code == 0)


def _blame(outcomes: Sequence[Outcome], ledger: Ledger, commits: Sequence[StepDone], first_s: float) -> None:
    """Steps that were taken back are put down to the last fault on a worker or server before they were made anew."""
    for rollback in ledger.rollbacks:
        began = _first(commit for commit in commits if commit.generation == rollback.generation)
        before = [
            one for one in outcomes if one.kind in (*ON_WORKERS, *ON_SERVERS) and began and one.at_s + first_s <= began
        ]
        if before:
            before[-1].steps_lost += rollback.steps


def _standstills(outcomes: Sequence[Outcome]) -> list[tuple[float, float]]:
    """From when until when nothing was committed; a full disk stops no step."""
    known = [one for one in outcomes if one.kind != "disk" and one.recovered_s is not None]
    return [(one.at_s, one.at_s + (one.recovered_s or 0.0)) for one in known]


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that are in any of the spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
