"""Recovery decision for a partitioned model: the step to continue from, and which rank copies whose state. Pure.

Each replica has every part of the model once, so the ranks of one line along the data axis have the same part and the
same state. A step is committed after an exchange between the ranks of a replica, so ranks differ by at most one step.
A step that only some ranks have committed counts if, for every part of the model, a rank has committed it. Start
reading at `hand_over`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from manyhands.comm.mesh import Formation, Grid

__all__ = ["PartRecovery", "hand_over", "words"]


class PartProgress(Protocol):
    """What `hand_over` reads of a rank's `WorkerProgress`."""

    @property
    def step(self) -> int: ...
    @property
    def has_state(self) -> bool: ...
    @property
    def doing(self) -> str: ...


class PartRecovery(NamedTuple):
    step: int
    """The committed step of all ranks after the recovery."""
    givers: tuple[int, ...]
    """By rank: the source of the state for its line along the data axis; ranks of the line at another step copy it."""
    takes: tuple[bool, ...]
    """By rank: whether it copies that state."""


def hand_over(progress: Sequence[PartProgress], formation: Formation) -> PartRecovery | None:
    """The recovery from the progress of each rank; None if the run has to return to its last checkpoint.

    That is so if there is no step at which every part of the model has a rank, or if a rank would have to undo a step
    whose following operation (an evaluation, a save) it has begun: it would continue that operation alone.
    """
    lines = [formation.line(rank, "data") for rank in range(len(progress))]
    for step in sorted({one.step for one in progress if one.has_state}, reverse=True):
        at_step = [one.has_state and one.step == step for one in progress]
        givers = [found[0] for line in lines if (found := [other for other in line if at_step[other]])]
        if len(givers) == len(lines):
            is_past_step = any(one.has_state and one.step > step and one.doing != "steps" for one in progress)
            return None if is_past_step else PartRecovery(step, tuple(givers), tuple(not one for one in at_step))
    return None


def words(part: Grid, replica: Grid) -> str:
    """A part of the model for messages, such as: stage 2 of 4, part 1 of 2 of the layers."""
    stage = f"stage {part.pipeline + 1} of {replica.pipeline}" if replica.pipeline > 1 else ""
    split = f"part {part.tensor + 1} of {replica.tensor} of the layers" if replica.tensor > 1 else ""
    return ", ".join(one for one in (stage, split) if one)
