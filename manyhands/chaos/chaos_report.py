"""Evaluates how a run recovered from each fault: injected faults and events in, a report out. Pure.

All times (of faults, agent and chief) are of one host's clock. A lost worker is detected when its agent records it. The
run has recovered when the first step is committed by a generation that started after that: a step in flight that the
other workers finish without the lost one proves nothing. From a lost server it has recovered with the first update that
the replacement process makes. Start reading at `judge`.
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
from manyhands.observe.run_audit import RunLedger, audit, generation_key

Kind = TypeVar("Kind", bound=Event)

__all__ = ["ChaosReport", "FaultOutcome", "Weights", "judge"]


class FaultOutcome(msgspec.Struct, kw_only=True):
    """One fault and its effect. Seconds are from the injection; None: it never happened."""

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
    """The last checkpoints of both runs, compared bit for bit: weights, buffers, optimizer state."""

    step: int
    reference_step: int
    tensors: int
    different: list[str]
    """Names of tensors that differ, or that only one checkpoint has."""

    @property
    def same_step(self) -> bool:
        return self.step == self.reference_step and self.tensors > 0

    @property
    def equal(self) -> bool:
        return self.same_step and not self.different


class ChaosReport(msgspec.Struct, kw_only=True):
    exit_code: int
    """Exit code of the run with faults."""
    exact: bool
    """The script set exact=True: only then are equal weights promised."""
    mode: str = ""
    """Mode of parameter servers: "sync", "ssp" or "async"."""
    scheduled: int
    """Number of scheduled faults; those after the end of the run are not among the outcomes."""
    outcomes: list[FaultOutcome]
    ledger: RunLedger
    seconds: float
    """From the first committed step to the end of the faults or of the run."""
    steps: int
    """Steps committed in that time."""
    recovering_s: float
    goodput: float | None = None
    """Steps committed in that time, over those of the run without faults in equal time."""
    weights: Weights | None = None

    @property
    def expects_equal(self) -> bool:
        """Whether equal weights are expected; not if servers apply gradients asynchronously."""
        return self.mode not in ("ssp", "async")

    @property
    def passed(self) -> bool:
        """Whether the run recovered from everything; False if no fault was injected, which shows nothing."""
        injected = self.scheduled == 0 or any(not one.skipped for one in self.outcomes)
        well = self.exit_code == 0 and not self.ledger.problems and not any(one.is_bad for one in self.outcomes)
        return injected and well and self._weights_pass

    @property
    def _weights_pass(self) -> bool:
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
) -> ChaosReport:
    commits = _commits(events)
    first_s = commits[0].time_s if commits else 0.0
    ledger = audit(events)
    outcomes = [_outcome(strike, events, commits, first_s) for strike in strikes]
    _assign_rollbacks(outcomes, ledger, commits, first_s)
    last_recovery_s = max((one.at_s + (one.recovered_s or 0.0) for one in outcomes), default=0.0)
    ended_s = commits[-1].time_s - first_s if commits else 0.0
    window_s = min(ended_s, max(60.0 * minutes, last_recovery_s))
    steps = _steps_until(commits, first_s + window_s)
    speed, of_reference = _speed(steps, window_s), _speed_of(_commits(reference))
    return ChaosReport(
        exit_code=exit_code,
        exact=any(event.exact for event in events if isinstance(event, RunStarted)),
        mode=next((event.mode for event in events if isinstance(event, RunStarted) and event.mode), ""),
        scheduled=scheduled,
        outcomes=outcomes,
        ledger=ledger,
        seconds=window_s,
        steps=steps,
        recovering_s=_covered(_recovery_spans(outcomes)),
        goodput=speed / of_reference if of_reference else None,
        weights=weights,
    )


def _commits(events: Sequence[Event]) -> list[StepDone]:
    """Committed steps in order of time, each once: the files overlap."""
    unique = {(event.generation, event.step, event.time_s): event for event in events if isinstance(event, StepDone)}
    return sorted(unique.values(), key=lambda event: event.time_s)


def _steps_until(commits: Sequence[StepDone], time_s: float) -> int:
    """Progress from the first step by that time; repeated steps count once."""
    done = [commit.step for commit in commits if commit.time_s <= time_s]
    return done[-1] - done[0] if done else 0


def _speed(steps: int, seconds: float) -> float:
    return steps / seconds if seconds > 0 else 0.0


def _speed_of(commits: Sequence[StepDone]) -> float:
    if not commits:
        return 0.0
    return _speed(commits[-1].step - commits[0].step, commits[-1].time_s - commits[0].time_s)


def _outcome(strike: Strike, events: Sequence[Event], commits: Sequence[StepDone], first_s: float) -> FaultOutcome:
    fault, started_s = strike.fault, strike.time_s
    outcome = FaultOutcome(number=fault.number, kind=fault.kind, who=strike.who, at_s=started_s - first_s)
    if strike.skipped:
        outcome.skipped, outcome.note = True, strike.skipped
        return outcome
    match fault.kind:
        case "coordinator":
            detected = _first(one for one in _after(events, Warned, started_s) if "coordinator" in one.text)
            recovered = None if detected is None else _first(_after(commits, StepDone, detected))
        case "disk":
            detected, recovered = _disk(strike, events, outcome)
        case "slow":
            detected, recovered = None, _first(_after(commits, StepDone, started_s))
            outcome.note = _slow_note(strike, events, commits)
        case "kill-template":
            detected = _first(one for one in _after(events, Warned, started_s) if "template" in one.text)
            recovered = None if detected is None else _first(_after(commits, StepDone, detected))
        case "stop-template":
            detected, recovered = None, _first(_after(commits, StepDone, started_s))
        case "agent":
            detected = _first(one for one in _after(events, GenerationStarted, started_s) if _is_without(one, strike))
            recovered = _next_commit_after_lost(detected, events, commits)
        case "kill-server" | "stop-server":
            detected = _first(one for one in _after(events, ServerLost, started_s) if one.pid == strike.pid)
            recovered = None if detected is None else _first(_first_updates(strike, events, detected))
        case _:
            detected = _lost_at(strike, events)
            recovered = _next_commit_after_lost(detected, events, commits)
    if recovered is None and (end := _well_ended(events, started_s)) is not None:
        recovered = end
        outcome.note = outcome.note or "the run ended before, successfully"
    outcome.detected_s = None if detected is None else detected - started_s
    outcome.recovered_s = None if recovered is None else recovered - started_s
    return outcome


def _after(events: Iterable[Event], kind: type[Kind], time_s: float) -> list[Kind]:
    found = [event for event in events if isinstance(event, kind) and event.time_s >= time_s]
    return sorted(found, key=lambda event: event.time_s)


def _first(events: Iterable[Event]) -> float | None:
    return next((event.time_s for event in events), None)


def _lost_at(strike: Strike, events: Sequence[Event]) -> float | None:
    return _first(one for one in _after(events, WorkerLost, strike.time_s) if one.pid == strike.pid)


def _first_updates(strike: Strike, events: Sequence[Event], since_s: float) -> list[ServerWentOn]:
    return [one for one in _after(events, ServerWentOn, since_s) if one.server == strike.slot]


def _is_without(started: GenerationStarted, strike: Strike) -> bool:
    """Whether this generation started because one of the agent's workers was lost; no agent is left to record each."""
    return any(f"(pid {pid})" in started.why for pid in strike.others)


def _slow_note(strike: Strike, events: Sequence[Event], commits: Sequence[StepDone]) -> str:
    assert strike.until_s is not None
    lost_s = _lost_at(strike, events)
    if lost_s is not None and lost_s < strike.until_s:
        return "the worker was lost in the meantime"
    steps = sum(strike.time_s <= commit.time_s < strike.until_s for commit in commits)
    return f"{steps} steps in its {strike.fault.lasts_s:g} s"


def _next_commit_after_lost(lost_s: float | None, events: Sequence[Event], commits: Sequence[StepDone]) -> float | None:
    if lost_s is None:
        return None
    newer = _after(events, GenerationStarted, lost_s)
    if not newer:
        return None
    least = generation_key(newer[0].generation)
    return _first(commit for commit in commits if generation_key(commit.generation) >= least)


def _disk(strike: Strike, events: Sequence[Event], outcome: FaultOutcome) -> tuple[float | None, float | None]:
    """Detected when a checkpoint fails, recovered when one is committed again; if none was due, with the next step."""
    assert strike.until_s is not None
    failed = _first(_after(events, CheckpointFailed, strike.time_s))
    if failed is None or failed >= strike.until_s:  # a later one belongs to another fault
        outcome.note = "no checkpoint was due in the meantime"
        return None, _first(_after(events, StepDone, strike.time_s))
    return failed, _first(_after(events, CheckpointSaved, strike.until_s))


def _well_ended(events: Sequence[Event], since_s: float) -> float | None:
    return _first(one for one in _after(events, RunEnded, since_s) if one.exit_code == 0)


def _assign_rollbacks(
    outcomes: Sequence[FaultOutcome], ledger: RunLedger, commits: Sequence[StepDone], first_s: float
) -> None:
    """Attribute rolled-back steps to the last fault on a worker or server before they were repeated."""
    for rollback in ledger.rollbacks:
        started_s = _first(commit for commit in commits if commit.generation == rollback.generation)
        before = [
            one
            for one in outcomes
            if one.kind in (*ON_WORKERS, *ON_SERVERS) and started_s and one.at_s + first_s <= started_s
        ]
        if before:
            before[-1].steps_lost += rollback.steps


def _recovery_spans(outcomes: Sequence[FaultOutcome]) -> list[tuple[float, float]]:
    """Time spans without commits; a full disk does not stop steps."""
    known = [one for one in outcomes if one.kind != "disk" and one.recovered_s is not None]
    return [(one.at_s, one.at_s + (one.recovered_s or 0.0)) for one in known]


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Total seconds covered by the spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
