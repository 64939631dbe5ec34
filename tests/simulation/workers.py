"""A simulated worker: it steps in its group, drops it at the first error, switches to a newer one, and offers itself.

Its state is a step and a digest of everything that went into it. A step changes both in one place, when a collective
that every member contributed to has come back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from manyhands.control.messages.agent_messages import HostPlan

from .history import Adopted, Applied, Committed, Entered

if TYPE_CHECKING:
    from .hosts import Agent
    from .world import World

SAVE_EVERY = 4


def number(generation: str) -> tuple[int, int]:
    term, counter = generation.split(".")
    return int(term), int(counter)


def digest(before: int, step: int, slices: tuple[int, ...]) -> int:
    value = before
    for part in (step, *sorted(slices)):
        value = (value * 1_000_003 + part + 1) % (2**61 - 1)
    return value


class Worker:
    def __init__(self, world: World, agent: Agent, slot: int, incarnation: int, *, joining: bool, attempt: int) -> None:
        self._world, self.agent = world, agent
        self.slot, self.incarnation, self.joining, self.attempt = slot, incarnation, joining, attempt
        self.alive, self.hanging, self.exit_code = True, False, 0
        self.status: Literal["live", "done", "failed", "left"] = "live"
        self.generation = ""
        self.group: tuple[int, ...] = ()
        self.offers = 0
        # A newcomer looks like a worker at the very start: only the coordinator knows that it has no state.
        self.step, self.digest, self.level = 0, 0, not joining
        self._booted = self._broken = False
        self.stranded = False
        """An exchange of its group failed, and it waits for a newer one."""
        self._newest: HostPlan | None = None
        self._moment = 0
        if not joining:
            self.step, self.digest = world.checkpoint
        self._later(world.random.uniform(0.1, 1.5), self._begin)

    # ---- life and death ----

    def _later(self, delay_s: float, action: Any) -> None:
        """Unless it dies, or does something else meanwhile; a process that hangs does it when it continues."""
        self._moment += 1
        self._world.at(delay_s, lambda moment=self._moment: self._if_still(moment, action))

    def _if_still(self, moment: int, action: Any) -> None:
        if not self.alive or moment != self._moment:
            return
        if self.hanging:
            self._world.at(0.1, lambda: self._if_still(moment, action))
        else:
            action()

    def die(self) -> None:
        self._end("failed")

    def hang(self, seconds: float) -> None:
        self.hanging = True
        self._world.at(seconds, self._continue)

    def _continue(self) -> None:
        self.hanging = False

    def asked_to_stop(self) -> None:
        """A member commits and ends after its next step, with the others; who is in no group just ends."""
        if not self.generation and self._booted:
            self._leave()

    def _leave(self) -> None:
        self.exit_code = 75
        self._end("done")

    def _end(self, status: Literal["done", "failed", "left"]) -> None:
        if self.alive:
            self.alive, self.status = False, status
            self.agent.saw_end(self)
            if self.generation and status != "done":
                self._world.plane.abort(self.generation, self.group, self.agent.name)

    @property
    def call(self) -> int:
        """Two public calls: the first takes half of the steps."""
        return 1 + (self.step >= self._world.history.num_steps // 2)

    # ---- groups ----

    def announce(self, plan: HostPlan) -> None:
        """The newest generation, from the agent."""
        if not self.alive or (self._newest and number(plan.generation) <= number(self._newest.generation)):
            return
        self._newest = plan
        if not self._booted:
            return
        if not self.generation or self._broken:
            self._later(0.005, self._regroup)
        elif plan.lost and number(plan.generation) > number(self.generation):
            self.lose(self.generation)

    def lose(self, generation: str) -> None:
        """A collective failed, or is known to be about to."""
        if self.alive and generation == self.generation and not self._broken:
            self._broken = self.stranded = True
            self.agent.report_soon()
            self._later(0.001, self._regroup)

    def _begin(self) -> None:
        self._booted = True
        self.offer()
        self._regroup()

    def offer(self) -> None:
        """Ready, in the call that the run is in, as last received. Asked again whenever that changes."""
        if self.alive and self._booted and self.joining and self.agent.run_call:
            self.offers = self.agent.run_call
            self.agent.report_soon()

    def _regroup(self) -> None:
        """Switch to the newest generation, if it is newer than this worker's; else wait for one."""
        plan = self._newest
        if plan is None or (self.generation and number(plan.generation) <= number(self.generation)):
            return
        group = tuple(place.incarnation for place in plan.group)
        if self.incarnation not in group:
            if self.generation:
                self._end("left")
            return
        self.generation, self.group = plan.generation, group
        self._broken = self.stranded = self.joining = False
        self._world.note(Entered(self._world.now, self.incarnation, self.generation))
        self.agent.report_soon()
        self._give("enter", (self.step, self.digest))

    def _give(self, what: str, value: Any) -> None:
        self._world.plane.contribute(self, self.generation, self.group, what, value)

    def receive(self, generation: str, what: str, values: list[tuple[int, Any]]) -> None:
        if not self.alive or self._broken or generation != self.generation:
            return
        if what == "enter":
            self._later(0.001, lambda: self._level([value for _, value in values]))
        else:
            self._later(0.001, lambda: self._apply(int(what), values))

    def _level(self, values: list[tuple[int, int]]) -> None:
        """Take over the state of the first that is furthest."""
        step, value = max(values, key=lambda pair: pair[0])
        if step > self.step or not self.level:
            self.step, self.digest, self.level = step, value, True
            self._world.note(Adopted(self._world.now, self.incarnation, self.generation, step, value))
        self._compute()

    # ---- steps ----

    def _compute(self) -> None:
        if self.step >= self._world.history.num_steps:
            self._later(0.05, lambda: self._end("done"))
        else:
            self._later(self._world.random.uniform(0.05, 0.5), self._contribute)

    def _contribute(self) -> None:
        rank, size = self.group.index(self.incarnation), len(self.group)
        mine = tuple(v for v in range(self._world.history.num_slices) if v % size == rank)
        plan = self._newest
        # Too few finish the step that they have begun, and wait for others.
        later = (plan is not None and number(plan.generation) > number(self.generation)) or self.too_few
        # The chief's message makes all members switch generation, or end, after the same step.
        word = "" if rank else "stop" if self.agent.stopping else "switch" if later else ""
        self._give(str(self.step + 1), (mine, word))

    @property
    def too_few(self) -> bool:
        return len(self.group) < self._world.history.least

    def _apply(self, step: int, values: list[tuple[int, Any]]) -> None:
        slices = tuple(v for _, (theirs, _) in values for v in theirs)
        self.step, self.digest = step, digest(self.digest, step, slices)
        contributors = tuple(incarnation for incarnation, _ in values)
        self._world.note(
            Applied(
                self._world.now,
                self.incarnation,
                self.generation,
                self.attempt,
                step,
                slices,
                contributors,
                self.digest,
            )
        )
        said = {word for _, (_, word) in values}
        if self.group[0] == self.incarnation and (step % SAVE_EVERY == 0 or "stop" in said):
            self._save()
        if "stop" in said:
            self._later(0.02, self._leave)
        elif "switch" in said:
            self._broken = True
            self._later(0.001, self._regroup)
        else:
            self._compute()

    def _save(self) -> None:
        generation = number(self.generation)
        if generation >= self._world.checkpoint_generation:
            self._world.checkpoint_generation = generation
            self._world.checkpoint = (self.step, self.digest)
            self._world.note(Committed(self._world.now, self.generation, self.attempt, self.step))
