"""One simulated run: a virtual clock, a network that loses, repeats, delays and reorders, and faults drawn from a seed.

The coordinator here is the real `react` and `orders_for`, with a disk that keeps only what was synced. Agents and
workers (`hosts`, `workers`) follow docs/protocols/elastic.md. Start reading at `run`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec

from manyhands.control.membership.orders import orders_for
from manyhands.control.membership.react import begin, react, restored
from manyhands.control.membership.state import (
    Membership,
    MembershipSettings,
    Output,
    Persist,
    ReportReceived,
    SendOrders,
    Ticked,
)
from manyhands.control.messages.agent_messages import HostReport, JobDescription, Orders
from manyhands.control.messages.launch_request import WorkerCommand

from .checker import PATIENCE_S
from .clock import Clock
from .history import Fault, Generation, History
from .hosts import Agent
from .plane import DataPlane

TICK_S = 0.25


@dataclass(frozen=True)
class Defects:
    """What is switched off, to show that the checker sees it."""

    fencing: bool = True
    deduplication: bool = True
    syncing: bool = True


class World(Clock):
    def __init__(self, seed: int, defects: Defects) -> None:
        super().__init__()
        self.random, self.defects = Random(seed), defects
        hosts = self.random.choice([1, 1, 2, 3])
        least = self.random.choice([1, 1, 2])
        self.history = History(seed=seed, least=least, num_slices=6, num_steps=self.random.randint(10, 24))
        self.plane = DataPlane(self)
        self.checkpoint, self.checkpoint_generation = (0, 0), (0, 0)
        self.loss = self.random.choice([0.0, 0.0, 0.1, 0.3])
        self.cut: set[str] = set()
        """Hosts that reach no other host."""
        self.deaf: set[str] = set()
        """Hosts that orders do not reach, while their workers reach each other."""
        self.mute: set[str] = set()
        """Hosts whose reports do not arrive."""
        self.agents: dict[str, Agent] = {}
        self.coordinator = Coordinator(self, hosts, least)
        slots = self.random.randint(max(1, least), 3)
        for name in "abc"[:hosts]:
            self.agents[name] = Agent(self, name, slots)
        self.calm = False

    def note(self, event: Any) -> None:
        self.history.events.append(event)

    # ---- the network ----

    def reach(self, one: str, other: str) -> bool:
        return one == other or not ({one, other} & self.cut)

    def send(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        """A control message between hosts (the coordinator is on "a"): late, twice or never."""
        draw = self.random.random
        lost = target in self.deaf or source in self.mute or (source != target and not self.calm and draw() < self.loss)
        if lost or not self.reach(source, target):
            return
        for _ in range(2 if not self.calm and draw() < 0.05 else 1):
            slow = not self.calm and draw() < 0.05
            self.at(draw() * (3.0 if slow else 0.03), deliver)

    # ---- faults ----

    def trouble(self) -> None:
        for _ in range(self.random.randint(1, 8)):
            self.at(self.random.uniform(0.2, 7.0), self._one_fault)

    def _one_fault(self) -> None:
        kind = self.random.choice(
            [
                "kill",
                "kill",
                "kill",
                "hang",
                "coordinator",
                "cut",
                "deaf",
                "mute",
                "scale",
                "scale",
                "agent",
                "leave",
                "stop",
                "abort",
            ]
        )
        {
            "kill": self._kill,
            "hang": self._hang,
            "coordinator": self.coordinator.crash,
            "cut": lambda: self._isolate(self.cut, "cut"),
            "deaf": lambda: self._isolate(self.deaf, "deaf"),
            "mute": lambda: self._isolate(self.mute, "mute"),
            "scale": self._scale,
            "stop": self._stop,
            "agent": lambda: self._lose_agent(leaving=False),
            "leave": lambda: self._lose_agent(leaving=True),
            "abort": self._abort_exchange,
        }[kind]()

    def fault(self, what: str) -> None:
        self.note(Fault(self.now, what))

    def _processes(self) -> list[Any]:
        return [worker for agent in self.agents.values() for worker in agent.workers.values() if worker.alive]

    def _kill(self) -> None:
        """One worker, or one and, a moment later, another."""
        for _ in range(self.random.choice([1, 1, 2])):
            if workers := self._processes():
                victim = self.random.choice(workers)
                self.fault(f"kill {victim.incarnation}")
                self.at(self.random.random() * 0.05, victim.die)

    def _hang(self) -> None:
        if workers := self._processes():
            victim = self.random.choice(workers)
            self.fault(f"hang {victim.incarnation}")
            victim.hang(self.random.uniform(0.5, 6.0))

    def _abort_exchange(self) -> None:
        """Some connection between members breaks, and all of them live."""
        if members := [worker for worker in self._processes() if worker.generation]:
            worker = self.random.choice(members)
            self.fault(f"abort {worker.generation}")
            self.plane.abort(worker.generation, worker.group, worker.agent.name)

    def _isolate(self, which: set[str], word: str) -> None:
        others = [name for name, agent in self.agents.items() if name != "a" and not agent.gone]
        if others:
            name = self.random.choice(others)
            self.fault(f"{word} {name}")
            which.add(name)
            self.at(self.random.uniform(0.5, 12.0), lambda: which.discard(name))

    def _scale(self) -> None:
        self.agents["a"].wanted = self.random.randint(0, 8)
        self.fault(f"scale {self.agents['a'].wanted}")
        self.agents["a"].report_soon()

    def _stop(self) -> None:
        if self.random.random() < 0.3:
            self.fault("stop")
            self.history.stopped = True
            self.agents["a"].stop()

    def _lose_agent(self, *, leaving: bool) -> None:
        others = [name for name, agent in self.agents.items() if name != "a" and not agent.gone]
        if not others or not self.history.of(Generation):
            return  # Before the first generation the run rightly waits minutes for its hosts.
        name = self.random.choice(others)
        self.fault(f"{'leave' if leaving else 'lose'} agent {name}")
        self.history.hosts_lost = True
        if leaving:
            self.agents[name].leave()
        else:
            self.agents[name].vanish()
        if self.random.random() < 0.5 and len(self.agents) < 6:
            heir = "defghi"[len(self.agents) - 1]
            slots = self.agents[name].slots
            self.agents[heir] = Agent(self, heir, slots, begins_in_s=self.random.uniform(0.5, 4.0))

    def heal(self) -> None:
        self.calm = True
        for isolated in (self.cut, self.deaf, self.mute):
            isolated.clear()
        self.history.healed_at = self.now


class Coordinator:
    def __init__(self, world: World, hosts: int, least: int) -> None:
        world.history.budget = world.random.choice([0, 2, 1000, 1000, 1000, 1000])
        budget = world.history.budget
        job = JobDescription(command=WorkerCommand("script", "t.py"), flags={}, grace_s=1.0, max_restarts=budget)
        settings = MembershipSettings(run="r", job=job, versions={}, hosts_wanted=hosts, elastic=(least, 8))
        self._world = world
        self._disk: list[Membership] = []
        self._known = ""
        self.up = True
        self._where: set[str] = set()
        self._start(begin(settings, 1, 0.0))

    def _start(self, state: Membership) -> None:
        self.state, self._where = state, set()
        self._write(state)
        self._world.at(TICK_S, self._tick(state.term))

    def _tick(self, term: int) -> Callable[[], None]:
        def tick() -> None:
            if self.up and self.state.term == term:
                self._apply(*react(self.state, Ticked(), self._world.now))
                self._world.at(TICK_S, tick)

        return tick

    def receive(self, report: HostReport) -> None:
        if self.up:
            self._where.add(report.agent)
            self._apply(*react(self.state, ReportReceived(report=report), self._world.now))

    def _apply(self, state: Membership, outputs: list[Output]) -> None:
        """As the real shell does; in troubled times it may die between any two things."""
        self.state = state
        for output in outputs:
            if not self._world.calm and self._world.random.random() < 0.003:
                self.crash()
                return
            match output:
                case Persist(state=durable):
                    self._write(durable)
                case SendOrders(agent=agent) if agent in self._where:
                    self._send(agent, orders_for(state, agent, self._world.now))

    def _send(self, name: str, orders: Orders) -> None:
        agent = self._world.agents[name]
        self._world.send("a", name, lambda: agent.obey(orders))
        if orders.do == "end" and name == "a":
            self._world.history.exit_code, self._world.history.reason = orders.exit_code, orders.note

    def _write(self, state: Membership) -> None:
        """Only a synced state is on disk. With a lying disk, the last one is in a cache that a crash forgets."""
        self._disk.append(state)
        roster = state.roster
        if roster is not None and roster.generation != self._known:
            self._known = roster.generation
            group = tuple(member.incarnation for member in roster.members)
            self._world.note(Generation(self._world.now, roster.generation, roster.attempt, group, roster.lost))

    def crash(self) -> None:
        if not self.up:
            return
        self.up = False
        self._world.fault("coordinator dies")
        if not self._world.defects.syncing and len(self._disk) > 1:
            del self._disk[-self._world.random.randint(1, min(3, len(self._disk) - 1)) :]
        self._world.at(self._world.random.uniform(0.1, 2.0), self._revive)

    def _revive(self) -> None:
        before = msgspec.json.decode(msgspec.json.encode(self._disk[-1]), type=Membership)
        self.up = True
        self._start(restored(before, before.term + 1, self._world.now))

    def surviving(self) -> list[str]:
        return [state.roster.generation for state in self._disk if state.roster is not None]


def run(seed: int, defects: Defects | None = None) -> History:
    """Play one run to its end, or to the end of all patience after its last fault."""
    world = World(seed, defects or Defects())
    world.trouble()
    world.play(12.0)
    if not world.over:
        world.heal()
        world.play(world.now + PATIENCE_S)
    history = world.history
    history.surviving = world.coordinator.surviving()
    history.stale = world.coordinator.state.stale
    history.ended_at = world.now if world.over else None
    return history
