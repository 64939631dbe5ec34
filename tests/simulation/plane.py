"""Collectives of the workers: one completes when every member of its generation has contributed, and for all or some.

Nothing here knows how groups come about. A contribution names its generation and incarnation; those that do not belong
are refused, and one that comes twice is taken once, unless the defects of this world say otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .history import Refused

if TYPE_CHECKING:
    from .workers import Worker
    from .world import World

RETRY_S = 0.2


@dataclass
class _Room:
    group: tuple[int, ...]
    given: list[tuple[Worker, Any]] = field(default_factory=list)
    complete: bool = False


class DataPlane:
    def __init__(self, world: World) -> None:
        self._world = world
        self._rooms: dict[tuple[str, str], _Room] = {}
        self._aborted: set[str] = set()
        self._unfenced: dict[str, list[tuple[Worker, Any]]] = {}
        """Without fencing: what workers have given for a step, in any generation."""

    def contribute(self, worker: Worker, generation: str, group: tuple[int, ...], what: str, value: Any) -> None:
        """Once this is complete, `worker.receive(generation, what, all values)` is called, unless it fails before."""
        times = 2 if self._world.random.random() < 0.1 else 1
        for _ in range(times):
            self._world.at(
                self._world.random.random() * 0.02, lambda: self._arrive(worker, generation, group, what, value)
            )

    def _arrive(self, worker: Worker, generation: str, group: tuple[int, ...], what: str, value: Any) -> None:
        fenced = self._world.defects.fencing
        room = self._rooms.setdefault((generation, what), _Room(group))
        if not fenced:
            room.given = self._unfenced.setdefault(what, [])
        if fenced and (worker.incarnation not in room.group or generation in self._aborted):
            self._world.note(Refused(self._world.now, worker.incarnation, generation))
            if generation in self._aborted:
                self._send(worker, generation, worker.agent.name)
            return
        known = [other.incarnation for other, _ in room.given]
        if worker.incarnation in known and self._world.defects.deduplication:
            return
        room.given.append((worker, value))
        self._look(generation, what, room)

    def _look(self, generation: str, what: str, room: _Room) -> None:
        if room.complete or generation in self._aborted:
            return
        here = {worker.incarnation for worker, _ in room.given}
        if not here >= set(room.group):
            return
        hosts = {worker.agent.name for worker, _ in room.given}
        if not all(self._world.reach(one, other) for one in hosts for other in hosts):
            self._world.at(RETRY_S, lambda: self._look(generation, what, room))
            return
        room.complete = True
        values = [(worker.incarnation, value) for worker, value in room.given]
        for worker in {worker.incarnation: worker for worker, _ in room.given}.values():
            self._world.at(self._world.random.random() * 0.02, self._delivery(worker, generation, what, values))

    def _delivery(self, worker: Worker, generation: str, what: str, values: list[Any]) -> Any:
        return lambda: worker.receive(generation, what, values)

    def abort(self, generation: str, group: tuple[int, ...], seen_from: str) -> None:
        """A member is gone: its sockets close. All learn of it, each in its own moment, or when a cut has healed."""
        self._aborted.add(generation)
        for agent in self._world.agents.values():
            for worker in agent.workers.values():
                if worker.incarnation in group:
                    self._send(worker, generation, seen_from)

    def _send(self, worker: Worker, generation: str, seen_from: str) -> None:
        def learn() -> None:
            if self._world.reach(seen_from, worker.agent.name):
                worker.lose(generation)
            elif worker.alive and worker.generation == generation:
                self._world.at(RETRY_S, learn)

        self._world.at(self._world.random.random() * 0.05, learn)
