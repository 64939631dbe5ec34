"""An elastic run's state machine and the hosts that report to it, for tests that decide what each of them says."""

from __future__ import annotations

from msgspec.structs import replace

from manyhands.control.membership.orders import orders_for
from manyhands.control.membership.react import begin, react
from manyhands.control.membership.state import ReportReceived, Ticked
from manyhands.control.messages.agent_messages import HostPlan, HostReport, MemberReport
from manyhands.control.messages.failure import WorkerEnd
from tests.control.membership.test_membership import JOB, report, settings_for

CALL = 1


class Scene:
    """A state machine and the hosts that report to it: what each worker says is set by the test, and repeated."""

    def __init__(self, hosts: int = 1, slots: int = 3, elastic: tuple[int, int] = (1, 8), **more) -> None:
        job = replace(JOB, max_restarts=more.pop("max_restarts", 2))
        self.settings = replace(settings_for(hosts, **more), elastic=elastic, job=job)
        self.state = begin(self.settings, term=7, now=0.0)
        self.now, self.outputs = 0.0, []
        self.slots = dict.fromkeys("abcdef"[:hosts], slots)
        self.words: dict[int, MemberReport] = {}
        self.where: dict[int, str] = {}
        self.slot_of: dict[int, int] = {}
        self.extra: dict[str, dict] = {}
        self.held: dict[str, str | None] = {}
        for agent in self.slots:
            self.say(agent)

    def say(self, agent: str, **more) -> None:
        members = {number: word for number, word in self.words.items() if self.where[number] == agent}
        clear = all(word.ended for word in members.values())
        fields = {"slots": self.slots[agent], "generation": self.held.get(agent), "members": members, "clear": clear}
        self.receive(report(agent, **{**fields, **self.extra.get(agent, {}), **more}))

    def receive(self, word: HostReport) -> None:
        self.state, self.outputs = react(self.state, ReportReceived(report=word), self.now)

    def tick(self, seconds: float, *silent: str) -> None:
        """Time goes by; every host that is not silent reports."""
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            for agent in [name for name in self.slots if name not in silent]:
                self.say(agent)
            self.state, self.outputs = react(self.state, Ticked(), self.now)

    def plan(self, agent: str = "a") -> HostPlan:
        plan = orders_for(self.state, agent, self.now).plan
        assert plan is not None
        return plan

    def obey(self, *silent: str) -> None:
        """Agents start what is planned and forget what is not; members switch to the newest generation."""
        if self.state.phase != "running":
            return
        for agent in [name for name in self.state.roster.agents if name not in silent and name in self.slots]:
            plan = self.plan(agent)
            self.held[agent] = plan.generation
            group = {place.incarnation for place in plan.group}
            planned = {worker.incarnation: worker for worker in plan.workers}
            for number, worker in planned.items():
                self.where[number] = agent
                self.slot_of[number] = worker.slot
                word = self.words.get(number) or MemberReport(pid=100 + number)
                if number in group and not word.ended:
                    word = replace(word, generation=plan.generation, call=CALL, offers=0)
                self.words[number] = word
            for number in [n for n in self.words if self.where[n] == agent and n not in planned]:
                if number not in plan.dismissed:
                    del self.words[number]
        for agent in [name for name in self.slots if name not in silent]:
            self.say(agent)

    def set(self, number: int, **more) -> None:
        self.words[number] = replace(self.words[number], **more)
        self.say(self.where[number])

    def kill(self, number: int, **more) -> None:
        fields = {
            "rank": self.slot_of[number],
            "host": "h",
            "pid": self.words[number].pid,
            "kind": "signal",
            "signal": 9,
        }
        end = WorkerEnd(**{**fields, **more})
        self.set(number, status="failed", ended=True, exit_code=end.exit_code, end=end)

    def raise_(self, number: int, error: str = "ValueError", code: int = 1, **more) -> None:
        self.kill(number, kind="exception", error=error, message="no", exit_code=code, signal=0, **more)

    def step(self, step: int) -> None:
        for place in list(self.group):
            self.words[place] = replace(self.words[place], step=step, first_step=0)
        for agent in self.slots:
            self.say(agent)

    @property
    def group(self) -> list[int]:
        return [member.incarnation for member in self.state.roster.members]

    @property
    def generation(self) -> str:
        return self.state.roster.generation

    @property
    def joining(self) -> list[int]:
        return [worker.incarnation for worker in self.state.roster.joining]


def started(hosts: int = 1, slots: int = 3, **more) -> Scene:
    scene = Scene(hosts, slots, **more)
    scene.obey()
    return scene


def die_in_slot_0(scene: Scene, at: int, how=Scene.kill, **more) -> None:
    """The worker in slot 0 dies at this step; its replacement is started and admitted."""
    scene.step(at)
    victim = next(w.incarnation for w in scene.plan().workers if w.slot == 0)
    how(scene, victim, **more)
    scene.obey()
    scene.tick(31.0)
    scene.obey()
    for number in scene.joining:
        scene.set(number, offers=CALL)
    scene.obey()
