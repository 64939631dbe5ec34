"""The mean of the values that workers give to `hands.mean` in a user loop, weighted by the rows of each worker.

`of_living` and `of_all` are for steps that all workers take together: each waits for the values of the others.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from torch import Tensor

from manyhands.comm.axis import Axis
from manyhands.data.batches import Step
from manyhands.training.worker.worker import Worker

__all__ = ["lacks_slices", "number", "of_all", "of_living", "rows_of", "weighted"]


def number(value: float | Tensor) -> float:
    """As a float. Detached first: torch warns about a float of a tensor that requires grad, such as the loss."""
    return float(value.detach() if isinstance(value, Tensor) else value)


def weighted(values: Iterable[tuple[int, float]]) -> float:
    """The weighted mean of (rows, value) pairs."""
    values = list(values)
    return sum(rows * value for rows, value in values) / max(1, sum(rows for rows, _ in values))


def rows_of(step: Step, slices: Iterable[int]) -> int:
    return sum(step.bounds[v][1] - step.bounds[v][0] for v in slices)


def of_living(axis: Axis, rows: int, value: float | None) -> float | None:
    """The mean over the live workers of an elastic run; a worker that died is not counted.

    A worker without a value gives None, and so do all workers when they begin the next step: then there is no mean.
    """
    gathered = axis.all_gather_bytes("hands", msgspec.msgpack.encode((rows, value)))
    decoded = [msgspec.msgpack.decode(data, type=tuple[int, float | None]) for data in gathered]
    values = [(rows, value) for rows, value in decoded if value is not None]
    return weighted(values) if values else None


def lacks_slices(step: Step) -> bool:
    """Whether some worker had no row in the step, as its slices were divided."""
    return not all(rows_of(step, share) for share in step.shares)


def of_all(worker: Worker, step: Step, key: str, value: float, timeout_s: float) -> float:
    """The mean over the workers that had a slice in the step; the others need not call."""
    if worker.world_size == 1:
        return value
    session = worker.session
    session.set(f"{key}/{worker.rank}", msgspec.msgpack.encode(value))
    shares = [(rank, rows) for rank, share in enumerate(step.shares) if (rows := rows_of(step, share))]
    return weighted(
        (rows, msgspec.msgpack.decode(session.get(f"{key}/{rank}", timeout_s), type=float)) for rank, rows in shares
    )
