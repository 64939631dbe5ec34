"""One host's view of the generations of an attempt: their members, in rank order, and which of them are alive.

Pure. `HostWorkers` asks which generations a worker's death affects, and which ones no worker of this host is in any
longer; the agent asks what group to announce to each worker.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from manyhands.control.membership.state import parse_generation
from manyhands.control.messages.agent_messages import GroupMember, HostPlan
from manyhands.spec.worker_identity import Group

__all__ = ["Generations", "group_for", "is_later"]


def is_later(generation: str, than: str) -> bool:
    """The empty generation, of a worker that is in none, is earlier than all others."""
    if not generation or not than:
        return bool(generation)
    return parse_generation(generation) > parse_generation(than)


def group_for(plan: HostPlan, incarnation: int) -> Group:
    """The plan's group as one process sees it; its rank is -1 if the process is not a member."""
    here = [member.incarnation for member in plan.group if member.host == plan.host]
    ranks = [member.incarnation for member in plan.group]
    return Group(
        generation=plan.generation,
        rank=ranks.index(incarnation) if incarnation in ranks else -1,
        world_size=len(ranks),
        local_rank=here.index(incarnation) if incarnation in here else -1,
        local_world_size=len(here),
        host=plan.host,
        num_hosts=plan.num_hosts,
        slots=[member.slot for member in plan.group],
        hosts=[member.host for member in plan.group],
        lost=plan.lost,
        call=plan.call,
    )


class Generations:
    """The generations that a worker of this host may still be in, oldest first."""

    def __init__(self) -> None:
        self.last_loss = ""
        self._here: dict[str, list[int]] = {}

    def announce(self, plan: HostPlan) -> list[str]:
        """Note a plan, new or repeated. Returns the earlier generations that workers have to leave at once."""
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
        """Forget, and return, the generations that all live members on this host have left; never the newest.

        `speaks_for`: the generation that each live process named in its last message.
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


def _local(group: list[GroupMember], host: int) -> list[int]:
    return [member.incarnation for member in group if member.host == host]
