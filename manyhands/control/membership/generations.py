"""One host's view of the generations of an attempt: who is in them, in which order, and who is still there.

Pure. The crew asks which planes a death ends and which generations nobody here is in any more; the agent, what to
tell each worker.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from manyhands.control.membership.state import parse_generation
from manyhands.control.messages.agent_messages import Place, Plan
from manyhands.spec.worker_identity import Group

__all__ = ["Groups", "group_for", "is_later"]


def is_later(generation: str, than: str) -> bool:
    """An empty generation is that of a worker in none: earlier than all."""
    if not generation or not than:
        return bool(generation)
    return parse_generation(generation) > parse_generation(than)


def group_for(plan: Plan, incarnation: int) -> Group:
    """The plan's group as one process sees it; rank -1 if it is not in it."""
    here = [place.incarnation for place in plan.group if place.host == plan.host]
    ranks = [place.incarnation for place in plan.group]
    return Group(
        generation=plan.generation,
        rank=ranks.index(incarnation) if incarnation in ranks else -1,
        world_size=len(ranks),
        local_rank=here.index(incarnation) if incarnation in here else -1,
        local_world_size=len(here),
        host=plan.host,
        num_hosts=plan.num_hosts,
        slots=[place.slot for place in plan.group],
        hosts=[place.host for place in plan.group],
        lost=plan.lost,
        call=plan.call,
    )


class Groups:
    """The generations that a worker of this host may still be in, oldest first."""

    def __init__(self) -> None:
        self.last_loss = ""
        self._here: dict[str, list[int]] = {}

    def announce(self, plan: Plan) -> list[str]:
        """A plan with a new generation, or again. The generations before it that are to be left at once."""
        if plan.generation in self._here:
            return []
        before = list(self._here)
        self._here[plan.generation] = _local(plan.group, plan.host)
        if plan.lost:
            self.last_loss = plan.generation
        return before if plan.lost else []

    def local_rank(self, generation: str, incarnation: int) -> int | None:
        members = self._here.get(generation, [])
        return members.index(incarnation) if incarnation in members else None

    def of(self, incarnation: int) -> list[str]:
        return [generation for generation, members in self._here.items() if incarnation in members]

    def gone(self, generation: str, living: Collection[int]) -> list[int]:
        """Local ranks of a generation's members that have ended."""
        return [rank for rank, member in enumerate(self._here.get(generation, [])) if member not in living]

    def leave(self, speaks_for: Mapping[int, str]) -> list[str]:
        """Forget, and return, the generations that all living members here have left; not the newest.

        `speaks_for`: the generation that each living process last spoke for.
        """
        newest = next(reversed(self._here), "")
        left = [
            generation
            for generation, members in self._here.items()
            if generation != newest
            and all(is_later(speaks_for[member], generation) for member in members if member in speaks_for)
        ]
        for generation in left:
            del self._here[generation]
        return left


def _local(group: list[Place], host: int) -> list[int]:
    return [place.incarnation for place in group if place.host == host]
