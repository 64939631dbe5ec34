"""Which step the workers of a divided model go on from when some were lost, and who gets its part from whom. Pure.

Every part of the model is in each replica once, so the workers on a line of the data axis have the same part and the
same state. A step is committed when mates have met in it, so workers differ by a step at most; one that some have
committed counts if every part of the model has somebody who has. Start reading at `hand_over`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from manyhands.comm.mesh import Formation, Grid

__all__ = ["Handover", "hand_over", "words"]


class Stands(Protocol):
    """Where a worker stands."""

    @property
    def step(self) -> int: ...
    @property
    def has_state(self) -> bool: ...
    @property
    def doing(self) -> str: ...


class Handover(NamedTuple):
    step: int
    """Where all stand afterwards."""
    givers: tuple[int, ...]
    """By rank: whose state those on its line of the data axis get, as far as they have another."""
    takes: tuple[bool, ...]
    """By rank: whether it does."""


def hand_over(standings: Sequence[Stands], formation: Formation) -> Handover | None:
    """By rank. None: whatever the step, some part of the model is with nobody who stands there.

    Or one would have to take a step back that does by now what follows it, and would go on with that.
    """
    lines = [formation.line(rank, "data") for rank in range(len(standings))]
    for step in sorted({one.step for one in standings if one.has_state}, reverse=True):
        there = [one.has_state and one.step == step for one in standings]
        givers = [found[0] for line in lines if (found := [other for other in line if there[other]])]
        if len(givers) == len(lines):
            is_past = any(one.has_state and one.step > step and one.doing != "steps" for one in standings)
            return None if is_past else Handover(step, tuple(givers), tuple(not one for one in there))
    return None


def words(part: Grid, replica: Grid) -> str:
    """Such as: stage 2 of 4, part 1 of 2 of its layers."""
    stage = f"stage {part.pipeline + 1} of {replica.pipeline}" if replica.pipeline > 1 else ""
    split = f"part {part.tensor + 1} of {replica.tensor} of the layers" if replica.tensor > 1 else ""
    return ", ".join(one for one in (stage, split) if one)
