"""Checks a run's recorded events: every step committed once, every sample of an epoch used once.

Pure: events in, findings out. The chief's `StepDone` commits a step. A chief that is killed loses up to a quarter of a
second of them; such steps count as unrecorded, and are accepted only if the positions of the steps before and after
determine exactly which rows they used. Asynchronous updates are not in the order of their rows, so they are first
sorted by the batches that they used. Start reading at `audit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
from msgspec.structs import replace

from manyhands.control.membership.state import parse_generation
from manyhands.events import Event, GenerationStarted, Resumed, RoundRestarted, RunEnded, StepDone
from manyhands.observe.recorder import read_events

__all__ = ["Rollback", "RunLedger", "audit", "audit_run", "generation_key", "read_run_events"]

# Most epoch sizes that are tried for an epoch whose end is not recorded.
MAX_SIZES_TRIED = 4096


class Rollback(msgspec.Struct, frozen=True):
    """Committed steps of a training that were undone: it restarted from a checkpoint, or from its last round."""

    to_step: int
    steps: int
    generation: str
    """The first generation that repeated them."""


class RunLedger(msgspec.Struct, kw_only=True):
    last_step: int = 0
    """Sum over all trainings."""
    recorded: int = 0
    """Recorded steps up to the last one, each counted once."""
    unrecorded: int = 0
    """Steps without a record whose rows follow from the steps before and after."""
    rollbacks: list[Rollback] = []
    generations: int = 0
    samples_lost: int = 0
    samples_repeated: int = 0
    """Within one epoch. Steps that were rolled back count for neither."""
    problems: list[str] = []
    """Each violation of the promises, as text; empty: they were kept."""

    @property
    def steps_lost(self) -> int:
        return sum(rollback.steps for rollback in self.rollbacks)


def audit_run(run_dir: Path, *more: Path) -> RunLedger:
    """The ledger of a run directory. `more`: other files of the same events, such as the output of `mh run --json`."""
    return audit(read_run_events(run_dir, *more))


def read_run_events(run_dir: Path, *more: Path) -> list[Event]:
    files = [*sorted((run_dir / "events").glob("*.jsonl")), *more]
    return [event for file in files for event in read_events(file)]


def audit(events: Iterable[Event]) -> RunLedger:
    """Check a run's events: `GenerationStarted` in the order of writing, the others in any order.

    Each training of the script counts its own steps; the totals are over all trainings.
    """
    events = list(events)
    ledger = RunLedger()
    known = _check_generations(events, ledger)
    trainings = sorted({event.training for event in events if isinstance(event, StepDone)})
    for training in trainings:
        found = _audit_training([event for event in events if _is_of(event, training)], known)
        ledger.last_step += found.last_step
        ledger.recorded += found.recorded
        ledger.unrecorded += found.unrecorded
        ledger.samples_lost += found.samples_lost
        ledger.samples_repeated += found.samples_repeated
        ledger.rollbacks += found.rollbacks
        name = f"training {training}: " if len(trainings) > 1 else ""
        ledger.problems += [f"{name}{problem}" for problem in found.problems]
    return ledger


def _is_of(event: Event, training: int) -> bool:
    return getattr(event, "training", training) == training


def _audit_training(events: Sequence[Event], known: set[str]) -> RunLedger:
    ledger = RunLedger()
    commits = _in_order([event for event in events if isinstance(event, StepDone)])
    resumed = [event.step for event in events if isinstance(event, Resumed | RoundRestarted)]
    lineage = _lineage(commits, resumed, ledger)
    for commit in lineage:
        if known and commit.generation and commit.generation not in known:
            ledger.problems.append(
                f"step {commit.step} was committed in generation {commit.generation}, which was never announced"
            )
    if lineage:
        ledger.last_step, ledger.recorded = lineage[-1].step, len(lineage)
        batches = _by_batch(lineage)
        _check_start(batches, resumed, ledger)
        _check_samples(batches, ledger)
        _check_end(batches, events, ledger)
    return ledger


def generation_key(generation: str) -> tuple[int, int]:
    """Sort key of a generation. Records of earlier versions name none, which sorts first."""
    return parse_generation(generation) if generation else (0, 0)


def _check_generations(events: Sequence[Event], ledger: RunLedger) -> set[str]:
    started = [event.generation for event in events if isinstance(event, GenerationStarted)]
    known = set(started)
    ledger.generations = len(known)
    if sorted(known, key=generation_key) != list(dict.fromkeys(started)):
        ledger.problems.append(f"generations are not in ascending order: {' '.join(started)}")
    return known


def _in_order(commits: Sequence[StepDone]) -> list[StepDone]:
    """By generation, then by the clock of its chief. An event that two files contain counts once."""
    unique = {(commit.generation, commit.step, commit.time_s): commit for commit in commits}
    return sorted(unique.values(), key=lambda commit: (generation_key(commit.generation), commit.time_s))


def _lineage(commits: Sequence[StepDone], resumed: Sequence[int], ledger: RunLedger) -> list[StepDone]:
    """The commits that led to the run's last state; rolled-back and duplicate commits go into the ledger."""
    lineage: list[StepDone] = []
    for commit in commits:
        if lineage and commit.step <= lineage[-1].step:
            before = lineage[-1]
            if commit.step - 1 not in resumed:
                ledger.problems.append(
                    f"step {commit.step} was committed in generation {commit.generation or '-'}, after step "
                    f"{before.step} had been in generation {before.generation or '-'}"
                )
            else:
                back = Rollback(commit.step - 1, before.step - commit.step + 1, commit.generation)
                ledger.rollbacks.append(back)
            while lineage and lineage[-1].step >= commit.step:
                lineage.pop()
        lineage.append(commit)
    return lineage


def _by_batch(lineage: Sequence[StepDone]) -> list[StepDone]:
    """The commits, renumbered by the batch that each used. Asynchronous updates are not in the order of their batches;
    and with alternating optimizers several updates use the same batch."""
    if any(commit.turn is not None for commit in lineage):
        return _by_turns(lineage)
    batches = [commit if commit.batch is None else replace(commit, step=commit.batch) for commit in lineage]
    return sorted(batches, key=lambda batch: batch.step)


def _by_turns(lineage: Sequence[StepDone]) -> list[StepDone]:
    by_number: dict[int, StepDone] = {}
    for commit in lineage:
        number = (commit.step - 1) // (commit.turn[1] if commit.turn else 1) + 1
        by_number.setdefault(number, replace(commit, step=number))
    return [by_number[number] for number in sorted(by_number)]


def _check_end(batches: Sequence[StepDone], events: Sequence[Event], ledger: RunLedger) -> None:
    """In a run that succeeded, n updates used the first n batches. In one that failed, some were in progress."""
    beyond = [batch for batch in batches if batch.step > ledger.last_step]
    ledger.unrecorded += max(0, ledger.last_step - batches[-1].step)
    if beyond and any(event.exit_code == 0 for event in events if isinstance(event, RunEnded)):
        ledger.samples_lost += sum(batch.rows for batch in beyond)
        ledger.problems.append(
            f"{ledger.last_step} updates took batch {beyond[-1].step}, "
            f"so {len(beyond)} of the batches before it were skipped"
        )


def _check_start(lineage: Sequence[StepDone], resumed: Sequence[int], ledger: RunLedger) -> None:
    first = lineage[0]
    missing = first.step - 1
    if missing and missing not in resumed:
        sizes = _possible_sizes(lineage, _call(first), (missing + 1) * first.rows)
        is_exact = any(first.start in _after(missing, 0, 0, first.rows, size) for size in sizes)
        if is_exact or _fits_in(missing, (0, 0), first, lineage):
            ledger.unrecorded += missing
        else:
            ledger.problems.append(
                f"the first recorded step is {first.step}, and no record explains the steps before it"
            )


def _check_samples(lineage: Sequence[StepDone], ledger: RunLedger) -> None:
    sizes = _epoch_sizes(lineage)
    for before, after in pairwise(lineage):
        if before.start is None or after.start is None:
            continue  # written by a version that did not record it
        missing = after.step - before.step - 1
        if missing > 0:
            _check_gap(before, after, missing, lineage, ledger)
        elif after.start[0] == before.start[0]:
            _count(before.start[1] + before.rows, after.start[1], after.step, ledger)
        elif after.start[0] == before.start[0] + 1:
            _count(before.start[1] + before.rows, sizes[_call(before)], after.step, ledger)
            _count(0, after.start[1], after.step, ledger)
        else:
            ledger.problems.append(f"step {after.step} went from epoch {before.start[0]} to {after.start[0]}")


def _count(expected: int, found: int, step: int, ledger: RunLedger) -> None:
    if found > expected:
        ledger.samples_lost += found - expected
        ledger.problems.append(f"before step {step}, {found - expected} samples were never used")
    elif found < expected:
        ledger.samples_repeated += expected - found
        ledger.problems.append(f"step {step} used {expected - found} samples of this epoch again")


def _call(commit: StepDone) -> int:
    """The epoch that its call of `fit` started with, which identifies the data of the call."""
    return commit.start[0] - commit.epoch if commit.start is not None else 0


def _epoch_sizes(lineage: Sequence[StepDone]) -> dict[int, int]:
    """Rows of an epoch, by call: the largest row that any step of the call reached."""
    sizes: dict[int, int] = {}
    for commit in lineage:
        if commit.start is not None:
            sizes[_call(commit)] = max(sizes.get(_call(commit), 0), commit.start[1] + commit.rows)
    return sizes


def _possible_sizes(lineage: Sequence[StepDone], call: int, beyond: int) -> range:
    """Possible numbers of rows in an epoch of this call: if no record shows its end, up to `beyond` more than seen."""
    size = _epoch_sizes(lineage).get(call, 0)
    ends = any(
        before.start and after.start and after.step == before.step + 1 and after.start[0] > before.start[0]
        for before, after in pairwise(lineage)
        if _call(before) == call
    )
    return range(size, size + (1 if ends else min(beyond, MAX_SIZES_TRIED)))


def _after(steps: int, epoch: int, row: int, batch: int, size: int) -> set[tuple[int, int]]:
    """Where the step after `steps` steps starts; at the end of an epoch, either there or in the next epoch."""
    for _ in range(steps):
        if row >= size:
            epoch, row = epoch + 1, 0
        row = min(row + batch, size)
    return {(epoch, row), (epoch + 1, 0)} if row >= size else {(epoch, row)}


def _fits_in(missing: int, since: tuple[int, int], after: StepDone, lineage: Sequence[StepDone]) -> bool:
    """Whether `missing` steps fit between, if batch sizes vary: each step has at least one row."""
    if after.start is None or not _sizes_vary(lineage, _call(after)):
        return False
    return after.start[0] > since[0] or after.start[1] - since[1] >= missing


def _sizes_vary(lineage: Sequence[StepDone], call: int) -> bool:
    """Whether steps of a call differ in their number of rows other than at the end of an epoch."""
    rows = {
        before.rows
        for before, after in pairwise(lineage)
        if _call(before) == call and before.start and after.start and before.start[0] == after.start[0]
    }
    return len(rows) > 1


def _check_gap(before: StepDone, after: StepDone, missing: int, lineage: Sequence[StepDone], ledger: RunLedger) -> None:
    """Whether unrecorded steps can have used exactly the rows between those of the steps before and after."""
    assert before.start is not None
    epoch, row, batch = before.start[0], before.start[1] + before.rows, max(before.rows, after.rows)
    sizes = _possible_sizes(lineage, _call(before), (missing + 1) * batch)
    is_exact = any(after.start in _after(missing, epoch, row, batch, size) for size in sizes)
    if is_exact or _fits_in(missing, (epoch, row), after, lineage):
        ledger.unrecorded += missing
    else:
        ledger.problems.append(
            f"steps {before.step + 1} to {after.step - 1} are not recorded, and step {after.step} does not begin where "
            f"they would have ended"
        )
