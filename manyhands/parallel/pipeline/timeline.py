"""A schedule simulated with given durations: when each operation runs, how long ranks wait, how much memory they need.

Arithmetic only, to compare theory with what a run measured. Start reading at `play`; `draw` prints it as a grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from manyhands.errors import ManyhandsError
from manyhands.parallel.pipeline.schedule import Op, Schedule

__all__ = ["Durations", "Timeline", "TimelineSpan", "draw", "needs", "play"]


class Durations(msgspec.Struct, frozen=True):
    """How long each stage's operations take, in any unit, but the same for all."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    """Both halves together, if it is split."""
    inputs_share: float = 0.5
    """The fraction of a split backward that computes the gradients of inputs."""
    transfer: float = 0.0
    """From a stage to the next on another rank."""

    @staticmethod
    def even(stages: int) -> Durations:
        """Equal stages; a backward takes as long as two forwards."""
        return Durations((1.0,) * stages, (2.0,) * stages)

    def of(self, op: Op, splits: bool) -> float:
        if op.kind == "F":
            return self.forward[op.stage]
        share = 1.0 if not splits else self.inputs_share if op.kind == "B" else 1.0 - self.inputs_share
        return self.backward[op.stage] * share


class TimelineSpan(NamedTuple):
    op: Op
    start: float
    stop: float


class Timeline(msgspec.Struct, frozen=True):
    """Each rank's operations with their times, from 0 to `makespan`."""

    spans: tuple[tuple[TimelineSpan, ...], ...]
    most_alive: tuple[int, ...]
    """By rank: the largest number of forwards whose activations it keeps at once."""

    @property
    def makespan(self) -> float:
        return max((span.stop for row in self.spans for span in row), default=0.0)

    @property
    def bubble(self) -> float:
        """The fraction of the ranks' time in which they wait."""
        busy = sum(span.stop - span.start for row in self.spans for span in row)
        return 1.0 - busy / (len(self.spans) * self.makespan) if self.makespan else 0.0


def play(schedule: Schedule, durations: Durations | None = None) -> Timeline:
    """Every rank does its row in order, each operation as soon as its inputs have arrived.

    Without durations a backward takes twice as long as a forward. A deadlock is a bug of manyhands, and raises an
    error.
    """
    durations = durations or Durations.even(schedule.stages)
    spans: list[list[TimelineSpan]] = [[] for _ in schedule.rows]
    ended: dict[Op, float] = {}
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(schedule.rows):
            while len(spans[rank]) < len(row):
                op = row[len(spans[rank])]
                ready = _ready(op, schedule, durations, ended)
                if ready is None:
                    break
                start = max(ready, spans[rank][-1].stop if spans[rank] else 0.0)
                ended[op] = start + durations.of(op, schedule.splits_backward)
                spans[rank].append(TimelineSpan(op, start, ended[op]))
                progress = True
    _check_all_ran(schedule, spans)
    return Timeline(tuple(map(tuple, spans)), tuple(_most_alive(row, schedule) for row in schedule.rows))


def needs(op: Op, schedule: Schedule) -> list[Op]:
    """The operations that must have ended, on any rank, before this one can start."""
    kind, stage, microbatch = op
    if kind == "W":
        return [Op("B", stage, microbatch)]
    if kind == "F":
        return [Op("F", stage - 1, microbatch)] if stage else []
    last = stage == schedule.stages - 1
    return [Op("F", stage, microbatch), *([] if last else [Op("B", stage + 1, microbatch)])]


def _ready(op: Op, schedule: Schedule, durations: Durations, ended: Mapping[Op, float]) -> float | None:
    """When all of its inputs are there; None: not known yet."""
    times = [0.0]
    for needed in needs(op, schedule):
        if needed not in ended:
            return None
        is_remote = schedule.ranks_of_stages[needed.stage] != schedule.ranks_of_stages[op.stage]
        times.append(ended[needed] + (durations.transfer if is_remote else 0.0))
    return max(times)


def _check_all_ran(schedule: Schedule, spans: Sequence[Sequence[TimelineSpan]]) -> None:
    stuck = [
        f"rank {rank} at {row[len(done)]} of stage {row[len(done)].stage}"
        for rank, (row, done) in enumerate(zip(schedule.rows, spans, strict=True))
        if len(done) < len(row)
    ]
    if stuck:
        raise ManyhandsError(f"Schedule {schedule.name!r} deadlocks: {', '.join(stuck)}.")


def _most_alive(row: Sequence[Op], schedule: Schedule) -> int:
    """A forward's activations are kept until the end of the stage's backward."""
    freeing = "W" if schedule.splits_backward else "B"
    alive = most = 0
    for op in row:
        alive += (op.kind == "F") - (op.kind == freeing)
        most = max(most, alive)
    return most


def summary(schedule: Schedule, timeline: Timeline) -> str:
    return (
        f"{schedule.name}: {schedule.ranks} ranks x {schedule.chunks} stages, {schedule.microbatches} microbatches, "
        f"bubble {timeline.bubble:.1%}, activations kept {' '.join(map(str, timeline.most_alive))}"
    )


def draw(schedule: Schedule) -> str:
    """A line per rank, with equal stages; a column per unit of time, which is that of a forward.

    Operations of a rank's second stage and later ones have a mark: F0 F0' F0".
    """
    timeline = play(schedule)
    first = min(span.stop - span.start for row in timeline.spans for span in row)
    cells = [_cells(row, schedule, first) for row in timeline.spans]
    width = max(len(text) for row in cells for _, _, text in row) + 1
    lines = []
    for rank, row in enumerate(cells):
        line = ""
        for start, columns, text in row:
            line = line.ljust(start * width) + text.ljust(columns * width, "·" if columns > 1 else " ")
        lines.append(f"rank {rank} │{line.rstrip()}")
    return "\n".join([summary(schedule, timeline), *lines])


def _cells(row: Sequence[TimelineSpan], schedule: Schedule, unit: float) -> list[tuple[int, int, str]]:
    """The first column, number of columns and text of each operation."""
    marks = ("", "'", '"', "*")
    return [
        (
            round(span.start / unit),
            max(1, round((span.stop - span.start) / unit)),
            f"{span.op}{marks[min(span.op.stage // schedule.ranks, 3)]}",
        )
        for span in row
    ]
