"""Recovery decision after a change of generation: whose state is copied to whom, and which operation is repeated. Pure.

All ranks exchange their `WorkerProgress` and decide from the same values, so every rank reaches the same decision.
Start reading at `decide`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from manyhands.parallel.replicas.model_parallel_replica import PartitionSpec
from manyhands.parallel.weights.replica_backend import Mapped

__all__ = [
    "Doing",
    "Evaluated",
    "RecoveryOutcome",
    "WorkerProgress",
    "can_join",
    "decide",
    "evaluation_result",
    "finished_operations",
    "is_done",
    "trainings_differ",
]

Evaluated = tuple[dict[str, float], int]
"""Means over all rows, and their number."""
Doing = Literal["steps", "an evaluation", "something else"]
"""The operation a worker is in. Newcomers can join steps, and an evaluation: the first operation after its step."""


class WorkerProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a worker is; it sends this to the other members of the new generation."""

    call: int
    step: int
    """Committed steps."""
    use: int = 0
    """How often the training in use has changed on this worker, its first one included."""
    steps: dict[int, int] = {}
    """Committed steps by training, of all trainings that the worker knows of."""
    operation: int
    """Number of collective operations since that step, including the one in progress."""
    doing: Doing
    done: bool
    """The worker has the result of the last of those operations."""
    has_state: bool
    is_newcomer: bool = False
    """The worker was started while the run was already training, and has no state yet."""
    division: str = ""
    """The generation that assigned the slices of the step in progress; empty: no step is in progress."""
    mapped: Mapped | None = None
    parts: PartitionSpec | None = None
    """How the model is partitioned; None if this worker has no part of it."""
    result: Evaluated | None = None
    """The result of the last operation, if that is an evaluation and the worker has it."""
    resumed: int = 0
    """The call in which the checkpoint was taken that this worker resumed from; 0: it resumed from none."""

    @property
    def position(self) -> tuple[int, int, int, int]:
        return self.use, self.call, self.step, self.operation


class RecoveryOutcome(NamedTuple):
    """What the change of generation means for one worker."""

    received: bool
    """This worker was behind, and has received the state of another one."""
    same_step: bool
    """All workers are in the same step, with slices that the same generation assigned."""
    all_done: bool
    """Every member has the result of the operation that this worker is in."""


def decide(progress: Sequence[WorkerProgress], rank: int) -> tuple[int | None, bool, RecoveryOutcome]:
    """Whose state is copied (None: no rank has one), whether any rank needs it, and the outcome for `rank`."""
    mine = progress[rank]
    if trainings_differ(progress):
        return None, False, RecoveryOutcome(received=False, same_step=False, all_done=is_done(progress, mine))
    members = [i for i, one in enumerate(progress) if one.has_state]
    if not members:
        return None, False, RecoveryOutcome(received=False, same_step=False, all_done=False)
    newest = max(progress[i].step for i in members)
    source = max(members, key=lambda i: (progress[i].step, progress[i].operation, -i))
    behind = [not one.has_state or one.step < newest for one in progress]
    same = mine.division != "" and not any(behind) and all(one.division == mine.division for one in progress)
    return source, any(behind), RecoveryOutcome(behind[rank], same_step=same, all_done=is_done(progress, mine))


def trainings_differ(progress: Sequence[WorkerProgress]) -> bool:
    """Whether some workers have begun a training that the others have not reached: they have no state in common."""
    return len({one.use for one in progress if one.has_state or not one.is_newcomer}) > 1


def is_done(progress: Sequence[WorkerProgress], mine: WorkerProgress) -> bool:
    """Whether every member has the result of the operation that `mine` is in. Newcomers do not count: they get it."""
    members = [one for one in progress if one.has_state or one.use > mine.use]
    return all(one.position > mine.position or (one.position == mine.position and _has_result(one)) for one in members)


def _has_result(one: WorkerProgress) -> bool:
    """Whether a worker has the result of its last operation. One that takes steps has finished all of them."""
    return one.done or one.doing == "steps"


def can_join(progress: Sequence[WorkerProgress], giver: WorkerProgress) -> bool:
    """Whether newcomers can join the operation of `giver`, whose state they get. They begin with the next step."""
    newcomers = [one for one in progress if one.is_newcomer]
    return not newcomers or (giver.doing != "something else" and all(one.use == giver.use for one in newcomers))


def finished_operations(giver: WorkerProgress) -> int:
    """Number of operations since the step that are finished for a worker that has received the state of `giver`."""
    return giver.operation if giver.doing == "steps" else giver.operation - 1


def evaluation_result(progress: Sequence[WorkerProgress], giver: WorkerProgress) -> Evaluated | None:
    """For newcomers: the result of an evaluation that no member repeats. None: they compute it too, or none exists."""
    return giver.result if is_done(progress, giver) else None
