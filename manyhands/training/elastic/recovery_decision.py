"""Where the workers of a group stand when it changes, and what follows: who gets whose state, what is done again.

Every worker tells every other its `Standing`, so all decide the same from the same. Pure. Start reading at `decide`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from manyhands.parallel.replicas.model_parallel_replica import Division
from manyhands.parallel.weights.replica_backend import Mapped

__all__ = [
    "Arrival",
    "Doing",
    "Evaluated",
    "Standing",
    "are_apart",
    "can_join",
    "decide",
    "has_behind_it",
    "is_done",
    "told_result",
]

Evaluated = tuple[dict[str, float], int]
"""Means over all rows, and their number."""
Doing = Literal["steps", "an evaluation", "something else"]
"""What workers are in the middle of. Newcomers can join steps, and an evaluation: the first thing after its step."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker stands, as it tells those it goes over with."""

    call: int
    step: int
    """Committed steps."""
    use: int = 0
    """Which of the trainings, one after another, it has in use."""
    steps: dict[int, int] = {}
    """Committed steps of all trainings that it knows of."""
    operation: int
    """How many things all workers did together since that step, with the one that it is in the middle of."""
    doing: Doing
    done: bool
    """It has the result of the last of those."""
    has_state: bool
    is_newcomer: bool = False
    """It was started into a run that others had begun, and has no state yet."""
    division: str = ""
    """The group that divided the step it is in the middle of; empty: it is in none."""
    mapped: Mapped | None = None
    parts: Division | None = None
    """How the model is divided, of one that has a part."""
    result: Evaluated | None = None
    """What it has the result of, if that is an evaluation."""
    resumed: int = 0
    """The call that the checkpoint was taken in which it began with; 0: it began with none."""

    @property
    def place(self) -> tuple[int, int, int, int]:
        return self.use, self.call, self.step, self.operation


class Arrival(NamedTuple):
    """How it stands once the worker has gone over."""

    received: bool
    """This worker was behind: it has another's state now."""
    same_step: bool
    """All are in the middle of the same step, as the same group divided it."""
    all_done: bool
    """Everybody has the result of what this worker is in the middle of."""


def decide(standings: Sequence[Standing], rank: int) -> tuple[int | None, bool, Arrival]:
    """Whose state the others get (None: nobody has one), whether anybody needs it, and what it means for `rank`."""
    mine = standings[rank]
    if are_apart(standings):
        return None, False, Arrival(received=False, same_step=False, all_done=is_done(standings, mine))
    members = [i for i, one in enumerate(standings) if one.has_state]
    if not members:
        return None, False, Arrival(received=False, same_step=False, all_done=False)
    newest = max(standings[i].step for i in members)
    source = max(members, key=lambda i: (standings[i].step, standings[i].operation, -i))
    behind = [not one.has_state or one.step < newest for one in standings]
    same = mine.division != "" and not any(behind) and all(one.division == mine.division for one in standings)
    return source, any(behind), Arrival(behind[rank], same_step=same, all_done=is_done(standings, mine))


def are_apart(standings: Sequence[Standing]) -> bool:
    """Some are done with one training and begin another, which the others have not come to: no state is common."""
    return len({one.use for one in standings if one.has_state or not one.is_newcomer}) > 1


def is_done(standings: Sequence[Standing], mine: Standing) -> bool:
    """Whether every member has the result of what this one is in the middle of. A newcomer is told it."""
    members = [one for one in standings if one.has_state or one.use > mine.use]
    return all(one.place > mine.place or (one.place == mine.place and _has_result(one)) for one in members)


def _has_result(one: Standing) -> bool:
    """Of the last thing that it counts. Who takes steps has gone on from all of them."""
    return one.done or one.doing == "steps"


def can_join(standings: Sequence[Standing], giver: Standing) -> bool:
    """Whether everybody does next what the giver of a state does. Newcomers would go on with the next step."""
    newcomers = [one for one in standings if one.is_newcomer]
    return not newcomers or (giver.doing != "something else" and all(one.use == giver.use for one in newcomers))


def has_behind_it(giver: Standing) -> int:
    """The operations since its step that are behind one who has this giver's state, and does next what it does."""
    return giver.operation if giver.doing == "steps" else giver.operation - 1


def told_result(standings: Sequence[Standing], giver: Standing) -> Evaluated | None:
    """The result of an evaluation that no member has to repeat; None: newcomers take part in it, or there is none."""
    return giver.result if is_done(standings, giver) else None
