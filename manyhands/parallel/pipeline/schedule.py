"""Pipeline schedules as data: the order of each rank's operations, computed before anything runs.

A model is cut into stages, a batch into microbatches; each rank has a row of operations: forward (F), backward (B), and
if backward is split in two halves, B for the gradients of inputs and W for those of weights. `timeline` computes the
time and memory of a schedule; `stage_runner` runs it. Schedules are valid for any number of microbatches, so a short
batch needs no special case. Start reading at `make_schedule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from manyhands.errors import SpecError

__all__ = ["SCHEDULES", "Op", "Schedule", "default_chunks", "make_schedule"]

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


class Op(NamedTuple):
    """One stage's work on one microbatch."""

    kind: str
    """F, B or W."""
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"


Row = tuple[Op, ...]


class Schedule(msgspec.Struct, frozen=True):
    """Each rank's row of operations, and the rank of each stage."""

    name: str
    microbatches: int
    chunks: int
    """Stages per rank."""
    ranks_of_stages: tuple[int, ...]
    rows: tuple[Row, ...]

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return len(self.ranks_of_stages)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights and of inputs are separate operations."""
        return self.name == "zero_bubble"

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.ranks_of_stages) if owner == rank]


def default_chunks(name: str) -> int:
    """The number of stages per rank if the user sets none."""
    return 2 if name in ("interleaved", "zero_bubble") else 1


def make_schedule(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """A schedule without deadlocks that finishes microbatches in ascending order on every rank.

    gpipe: all forwards, then all backwards. 1f1b: each backward as early as possible, which keeps fewer activations.
    interleaved: the same with several stages per rank, in rounds, for a shorter warm-up. zero_bubble: gradients of
    weights fill the waiting time; with two stages per rank in a V (ZB-V), with one as ZB-H1.
    """
    chunks = default_chunks(name) if chunks is None else chunks
    _check(name, ranks, microbatches, chunks)
    in_v = name == "zero_bubble" and chunks == 2
    loop = list(range(ranks)) * chunks
    owners = [*range(ranks), *reversed(range(ranks))] if in_v else loop
    if name == "gpipe":
        rows = [_gpipe(rank, microbatches) for rank in range(ranks)]
    elif name == "zero_bubble":
        make = _v if in_v else _delayed
        rows = [make(rank, ranks, microbatches) for rank in range(ranks)]
    else:
        rows = [_one_f_one_b(rank, ranks, microbatches, chunks) for rank in range(ranks)]
    rows_kept = tuple(tuple(op for op in row if op.microbatch < microbatches) for row in rows)
    return Schedule(name, microbatches, chunks, tuple(owners), rows_kept)


def _check(name: str, ranks: int, microbatches: int, chunks: int) -> None:
    if name not in SCHEDULES:
        raise SpecError(
            f"There is no pipeline schedule {name!r}.", fix=[f"schedule={choice!r}" for choice in SCHEDULES]
        )
    for what, number in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if number < 1:
            raise SpecError(f"A pipeline needs {what} above 0, not {number}.", fix=[f"{what}=1"])
    if name in ("gpipe", "1f1b") and chunks != 1:
        raise SpecError(
            f"schedule={name!r} has one stage per rank, not chunks={chunks}.",
            fix=["chunks=1", f'schedule="interleaved", chunks={chunks}'],
        )
    if name == "zero_bubble" and chunks > 2:
        raise SpecError(
            f'schedule="zero_bubble" has one or two stages per rank, not chunks={chunks}.',
            fix=["chunks=2", f'schedule="interleaved", chunks={chunks}'],
        )


def _gpipe(rank: int, microbatches: int) -> list[Op]:
    return [Op(kind, rank, m) for kind in "FB" for m in range(microbatches)]


def _one_f_one_b(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Op]:
    """Forwards until the first backward is due, then alternately one of each, then the remaining backwards.

    With several chunks, in rounds of as many microbatches as there are ranks. A last round that is not full is built
    as if it were: an order stays valid when some of its microbatches are left out.
    """
    if chunks > 1:
        microbatches = -(-microbatches // ranks) * ranks
    forwards = _in_rounds("F", rank, ranks, microbatches, range(chunks))
    backwards = _in_rounds("B", rank, ranks, microbatches, range(chunks - 1, -1, -1))
    lead = ranks - rank - 1 if chunks == 1 else (chunks - 1) * ranks + 2 * (ranks - rank - 1)
    lead = min(lead, len(forwards))
    turns = [op for pair in zip(forwards[lead:], backwards, strict=False) for op in pair]
    return [*forwards[:lead], *turns, *backwards[len(forwards) - lead :]]


def _in_rounds(kind: str, rank: int, ranks: int, microbatches: int, chunks: Sequence[int]) -> list[Op]:
    size = ranks if len(chunks) > 1 else microbatches
    return [
        Op(kind, chunk * ranks + rank, m)
        for start in range(0, microbatches, size)
        for chunk in chunks
        for m in range(start, start + size)
    ]


def _v(rank: int, ranks: int, microbatches: int) -> list[Op]:
    """ZB-V: the stages go down the ranks and up again, so that the last stage is on the first rank.

    Built for at least as many microbatches as fill the pipeline; missing microbatches are left out afterwards.
    """
    total = max(2 * ranks - 1, microbatches)
    down, up = _Stage(rank), _Stage(2 * ranks - 1 - rank)
    row = [down.next("F") for _ in range(2 * (ranks - rank) - 1)]
    for _ in range(rank):
        row += [up.next("F"), down.next("F")]
    for _ in range(ranks - rank):
        row += [up.next("F"), *up.both_halves()]
    while up.done["F"] < down.done["F"] or down.done["F"] < total:
        if down.done["F"] < total:
            row.append(down.next("F"))
        row += [*down.both_halves(), up.next("F"), *up.both_halves()]
    for _ in range(rank):
        row += [down.next("B"), up.next("B")]
    for _ in range(ranks - rank):
        row += [down.next("B"), down.next("W")]
    row += [up.next("W") for _ in range(up.done["W"], total)]
    return [*row, *(down.next("W") for _ in range(down.done["W"], total))]


class _Stage:
    """Counts how many microbatches of a stage have had each kind of operation."""

    def __init__(self, stage: int) -> None:
        self._stage, self.done = stage, {"F": 0, "B": 0, "W": 0}

    def next(self, kind: str) -> Op:
        self.done[kind] += 1
        return Op(kind, self._stage, self.done[kind] - 1)

    def both_halves(self) -> list[Op]:
        return [self.next("B"), self.next("W")]


def _delayed(rank: int, ranks: int, microbatches: int) -> list[Op]:
    """ZB-H1: 1f1b, with gradients of weights delayed by as many backwards as the rank's number: they fill the end."""
    row, stage = [], _Stage(rank)
    for op in _one_f_one_b(rank, ranks, microbatches, 1):
        row.append(op)
        if op.kind == "B" and op.microbatch >= rank:
            row.append(stage.next("W"))
    return [*row, *(stage.next("W") for _ in range(stage.done["W"], microbatches))]
