"""The mean of what workers say in a loop of the user's own, weighted by the rows that each has it from.

`of_living` and `of_all` are for steps that all workers take together: each waits for the others to say theirs.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from torch import Tensor

from manyhands.comm.axis import Axis
from manyhands.data.batches import Step
from manyhands.launcher.solo_run import Solo
from manyhands.training.worker.worker import Worker

__all__ = ["lacks_slices", "number", "of_all", "of_living", "rows_of", "weighted"]


def number(value: float | Tensor) -> float:
    """Of the loss itself, too: torch warns about a number taken from a tensor that still has its graph."""
    return float(value.detach() if isinstance(value, Tensor) else value)


def weighted(values: Iterable[tuple[int, float]]) -> float:
    """Of pairs of rows and value."""
    values = list(values)
    return sum(rows * value for rows, value in values) / max(1, sum(rows for rows, _ in values))


def rows_of(step: Step, slices: Iterable[int]) -> int:
    return sum(step.bounds[v][1] - step.bounds[v][0] for v in slices)


def of_living(axis: Axis, rows: int, value: float | None) -> float | None:
    """In an elastic run, of the workers that there are when all have called; one that has died says nothing.

    Who has nothing to say says None, and so do all that go on to the next step: then there is no mean.
    """
    told = axis.all_gather_bytes("hands", msgspec.msgpack.encode((rows, value)))
    said = [msgspec.msgpack.decode(data, type=tuple[int, float | None]) for data in told]
    values = [(rows, value) for rows, value in said if value is not None]
    return weighted(values) if values else None


def lacks_slices(step: Step) -> bool:
    """Whether some worker had no row in the step, as it was divided."""
    return not all(rows_of(step, share) for share in step.shares)


def of_all(worker: Worker, step: Step, key: str, value: float, timeout_s: float) -> float:
    """Of the workers that had a slice in the step; the others need not call."""
    if worker.world_size == 1:
        return value
    session = worker.session
    assert not isinstance(session, Solo), "more than one worker"
    session.set(f"{key}/{worker.rank}", msgspec.msgpack.encode(value))
    shares = [(rank, rows) for rank, share in enumerate(step.shares) if (rows := rows_of(step, share))]
    return weighted(
        (rows, msgspec.msgpack.decode(session.get(f"{key}/{rank}", timeout_s), type=float)) for rank, rows in shares
    )
