"""Elastic attempts, decided without a process or a socket: who is lost, who replaces them, who joins and who goes."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace
from test_membership import JOB, report, settings_for

from manyhands.control.failure import WorkerEnd
from manyhands.control.key_values import Stores
from manyhands.control.membership import begin, react, restored
from manyhands.control.messages import HostReport, MemberReport, Plan, StoreRequest
from manyhands.control.orders import orders_for
from manyhands.control.roster import Heard, Membership, Persist, Refuse, Tell, Ticked

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
        self.extra: dict[str, dict] = {}
        self.held: dict[str, str | None] = {}
        for agent in self.slots:
            self.say(agent)

    def say(self, agent: str, **more) -> None:
        members = [word for number, word in self.words.items() if self.where[number] == agent]
        clear = all(word.ended for word in members)
        fields = {"slots": self.slots[agent], "generation": self.held.get(agent), "members": members, "clear": clear}
        self.hear(report(agent, **{**fields, **self.extra.get(agent, {}), **more}))

    def hear(self, word: HostReport) -> None:
        self.state, self.outputs = react(self.state, Heard(report=word), self.now)

    def tick(self, seconds: float, *silent: str) -> None:
        """Time goes by; every host that is not silent reports."""
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            for agent in [name for name in self.slots if name not in silent]:
                self.say(agent)
            self.state, self.outputs = react(self.state, Ticked(), self.now)

    def plan(self, agent: str = "a") -> Plan:
        plan = orders_for(self.state, agent, self.now).plan
        assert plan is not None
        return plan

    def obey(self, *silent: str) -> None:
        """Agents start what is planned and forget what is not; members go over to the newest generation."""
        if self.state.phase != "running":
            return
        for agent in [name for name in self.state.roster.agents if name not in silent and name in self.slots]:
            plan = self.plan(agent)
            self.held[agent] = plan.generation
            group = {place.incarnation for place in plan.group}
            planned = {worker.incarnation: worker for worker in plan.workers}
            for number, worker in planned.items():
                self.where[number] = agent
                word = self.words.get(number) or MemberReport(
                    rank=worker.slot, incarnation=number, status="live", pid=100 + number
                )
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
        word = self.words[number]
        fields = {"rank": word.rank, "host": "h", "pid": word.pid, "kind": "signal", "signal": 9}
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


# ---- the first generation ----------------------------------------------------------------------------------------


def test_the_first_generation_lists_each_hosts_workers_and_the_whole_group():
    scene = Scene(hosts=2, slots=2)
    plan = scene.plan("b")
    assert [(w.slot, w.incarnation, w.joining) for w in plan.workers] == [(2, 3, False), (3, 4, False)]
    assert [(p.incarnation, p.slot, p.host) for p in plan.group] == [(1, 0, 0), (2, 1, 0), (3, 2, 1), (4, 3, 1)]
    assert (plan.generation, plan.lost, plan.call, plan.dismissed, plan.first_rank) == ("7.1", False, 0, [], 2)


def test_there_are_never_more_workers_than_the_upper_bound_and_not_fewer_than_the_lower():
    assert len(Scene(hosts=2, slots=4, elastic=(1, 6)).group) == 6
    assert len(Scene(slots=1, elastic=(2, 6)).group) == 2
    assert len(Scene(slots=4, workers_wanted=3).group) == 3


def test_a_static_run_is_told_nothing_of_elastic_things():
    state = begin(settings_for(1), term=7, now=0.0)
    state, _ = react(state, Heard(report=report()), 0.0)
    plan = orders_for(state, "a", 0.0).plan
    assert (plan.workers, plan.group, plan.dismissed, plan.lost) == ([], [], [], False)


# ---- losing ------------------------------------------------------------------------------------------------------


def test_a_dead_member_makes_a_generation_of_the_living_in_their_old_order_at_once():
    scene = started()
    scene.kill(1)
    assert (scene.generation, scene.group) == ("7.2", [2, 3])
    plan = scene.plan()
    assert plan.lost
    assert plan.why == "rank 0 on h (pid 101) died: SIGKILL"
    assert [place.slot for place in plan.group] == [1, 2], "a slot is kept, a rank is not"


def test_a_generation_after_a_loss_is_on_disk_before_anyone_hears_of_it():
    scene = started(hosts=2)
    scene.kill(1)
    first, *rest = scene.outputs
    assert isinstance(first, Persist)
    assert first.state.roster.generation == scene.generation == "7.2"
    assert rest == [Tell(agent="a"), Tell(agent="b")]


def test_a_failed_member_is_gone_only_when_its_process_is():
    scene = started()
    scene.set(1, status="failed")
    assert scene.generation == "7.1"
    scene.kill(1)
    assert scene.generation == "7.2"


def test_two_deaths_in_one_report_make_one_generation():
    scene = started()
    for number in (1, 3):
        end = WorkerEnd(rank=number - 1, host="h", pid=1, kind="signal", signal=9)
        scene.words[number] = replace(scene.words[number], status="failed", ended=True, end=end)
    scene.say("a")
    assert (scene.generation, scene.group) == ("7.2", [2])
    assert scene.plan().why == "rank 0 on h (pid 1) died: SIGKILL, and 1 more"


def test_a_silent_hosts_members_are_gone_as_soon_as_somebody_lives_elsewhere():
    scene = started(hosts=2, slots=2)
    scene.tick(4.5, "b")
    assert scene.generation == "7.1"
    scene.tick(1.5, "b")
    assert (scene.generation, scene.group) == ("7.2", [1, 2])
    assert "its host went silent" in scene.plan().why


def test_another_host_may_come_for_one_that_is_silent_and_stays_when_that_comes_back():
    scene = started(hosts=2, slots=1, elastic=(1, 2))
    scene.slots["c"] = 1
    scene.say("c")
    assert [type(output) for output in scene.outputs] == [Refuse], "two of two are there"
    del scene.slots["c"]
    scene.tick(6.0, "b")
    scene.slots["c"] = 1
    scene.say("c")
    assert not any(isinstance(output, Refuse) for output in scene.outputs)
    scene.tick(0.25, "b")
    assert [worker.agent for worker in scene.state.roster.joining] == ["c"], "it takes the place of the other's worker"
    scene.tick(1.0)
    assert set(scene.state.hosts) == {"a", "b", "c"}
    assert [worker.agent for worker in scene.state.roster.joining] == ["c"]
    scene.obey()
    scene.set(3, offers=CALL)
    assert (scene.group, scene.plan("c").lost) == ([1, 3], False)


def only_a_silent_host_is_left() -> Scene:
    scene = started(hosts=2, slots=1)
    scene.kill(1)
    scene.obey()
    scene.tick(6.0, "b")
    assert [member.status for member in scene.state.roster.members] == ["suspect"]
    assert (scene.generation, scene.state.phase) == ("7.2", "running")
    return scene


def test_members_of_a_silent_host_are_waited_for_when_nobody_else_lives_and_go_on_when_it_comes_back():
    scene = only_a_silent_host_is_left()
    scene.set(3, offers=CALL)
    assert scene.group == [2], "there is nobody whom it could join"
    scene.tick(2.0)
    assert (scene.generation, scene.group) == ("7.3", [2, 3])


def test_a_silent_host_with_the_last_members_that_stays_away_ends_the_run_with_4():
    scene = only_a_silent_host_is_left()
    scene.tick(60.0, "b")
    assert (scene.state.phase, scene.state.outcome.exit_code) == ("ended", 4)
    assert "host-b did not come back" in scene.state.outcome.reason


def test_silence_of_members_that_never_spoke_is_not_a_finished_run():
    scene = Scene(hosts=2, slots=1)
    scene.obey("b")
    scene.kill(1)
    scene.tick(70.0, "b")
    assert (scene.state.phase, scene.state.outcome.exit_code) == ("ended", 4)


def test_a_done_member_is_no_loss():
    scene = started()
    scene.set(2, status="done", ended=True, exit_code=0)
    scene.tick(1.0)
    assert scene.generation == "7.1"
    scene.kill(3)
    assert (scene.generation, scene.group) == ("7.2", [1])


def test_members_that_go_on_long_after_one_was_done_get_a_group_without_it():
    scene = started()
    scene.set(2, status="done", ended=True, exit_code=0)
    scene.tick(6.0)
    assert (scene.generation, scene.group, scene.plan().why) == ("7.2", [1, 3], "1 done")
    assert scene.joining == [], "who was done is not replaced"


def test_a_host_that_comes_back_is_believed_about_members_that_it_never_started():
    scene = Scene(hosts=2, slots=1)
    scene.obey("b")
    scene.kill(1)
    scene.tick(6.0, "b")
    assert [member.status for member in scene.state.roster.members] == ["suspect"]
    scene.tick(0.25)
    assert [member.status for member in scene.state.roster.members] == ["live"], "it can still be started"


# ---- too few -----------------------------------------------------------------------------------------------------


def test_below_the_lower_bound_the_few_finish_their_step_and_wait_for_enough_to_join_them():
    scene = started(slots=3, elastic=(3, 8))
    scene.kill(2)
    assert (scene.generation, scene.group, scene.plan().lost) == ("7.2", [1, 3], True)
    scene.obey()
    scene.set(4, offers=CALL)
    plan = scene.plan()
    assert (scene.generation, scene.group, plan.lost, plan.call) == ("7.3", [1, 3, 4], False, CALL)


def test_an_offer_at_another_call_does_not_make_it_enough():
    scene = started(slots=3, elastic=(3, 8))
    scene.kill(2)
    scene.obey()
    scene.set(4, offers=CALL + 1)
    assert scene.generation == "7.2"


def test_newcomers_whose_call_ended_before_they_were_admitted_are_taken_back():
    scene = started(slots=2)
    scene.step(20)
    scene.kill(2)
    scene.obey()
    scene.set(3, offers=CALL)
    assert (scene.generation, scene.group) == ("7.3", [1, 3])
    scene.set(1, call=CALL + 1)
    plan = scene.plan()
    assert (scene.generation, scene.group, plan.lost, plan.dismissed) == ("7.4", [1], True, [3])


# ---- a group that comes apart ------------------------------------------------------------------------------------


def test_a_group_that_came_apart_although_all_live_is_put_together_again():
    scene = started()
    scene.set(2, stranded=True)
    assert scene.generation == "7.1", "somebody's death may still become known"
    scene.tick(0.75)
    assert (scene.generation, scene.group, scene.plan().lost) == ("7.2", [1, 2, 3], True)
    assert scene.plan().why == "it came apart"


def test_nobody_is_admitted_to_a_group_that_came_apart_before_it_is_put_together_again():
    """Its members would be told to go over at the end of a step, to which they cannot come."""
    scene = started(slots=2)
    scene.step(20)
    scene.kill(2)
    scene.obey()
    scene.tick(0.25)
    scene.set(1, stranded=True)
    scene.set(3, offers=CALL)
    assert (scene.generation, scene.group) == ("7.2", [1])
    scene.tick(0.75)
    assert (scene.generation, scene.group, scene.plan().lost) == ("7.3", [1], True)
    scene.words[1] = replace(scene.words[1], stranded=False)
    scene.obey()
    scene.tick(0.25)
    assert (scene.generation, scene.group, scene.plan().lost) == ("7.4", [1, 3], False)


def test_whoever_waits_for_a_generation_that_is_there_is_not_stranded():
    scene = started()
    scene.kill(3)
    scene.set(2, stranded=True)
    assert scene.generation == "7.2"
    scene.tick(2.0)
    assert scene.generation == "7.2", "it just has not heard of it yet"


def test_a_group_that_comes_apart_again_and_again_ends_the_attempt():
    scene = started()
    for _ in range(11):
        scene.obey()
        scene.set(2, stranded=True)
        scene.tick(0.75)
        scene.words[2] = replace(scene.words[2], stranded=False)
    assert scene.state.phase == "stopping"
    assert "lost each other 10 times" in scene.state.roster.ends[0].end.message


def test_a_host_that_stays_away_does_not_keep_others_from_making_it_enough():
    scene = started(hosts=2, slots=1, elastic=(2, 4), workers_wanted=2)
    scene.tick(10.0, "b")
    assert (scene.generation, scene.group, scene.joining) == ("7.2", [1], []), "too few, and it may come back"
    scene.obey("b")
    scene.slots["c"] = 1
    scene.tick(60.0, "b")
    scene.obey("b")
    (newcomer,) = scene.joining
    scene.set(newcomer, offers=CALL)
    assert (scene.generation, scene.group) == ("7.3", [1, newcomer])


def test_too_few_and_nobody_to_come_ends_the_run_with_the_failure_block():
    scene = started(slots=2, elastic=(2, 4), max_restarts=0)
    scene.kill(1)
    scene.obey()
    scene.kill(3)
    assert scene.state.phase == "stopping", "its second death within ten steps spent the budget"
    scene.held["a"] = scene.generation
    for number in list(scene.words):
        scene.words[number] = replace(scene.words[number], status="failed", ended=True)
    scene.say("a")
    assert (scene.state.phase, scene.state.outcome.exit_code) == ("ended", 4)
    assert scene.state.outcome.failure.first.signal == 9


# ---- replacing ---------------------------------------------------------------------------------------------------


def test_a_dead_worker_is_replaced_in_its_slot_by_a_new_incarnation_that_joins():
    scene = started(hosts=2, slots=2)
    scene.kill(3)
    assert [(w.slot, w.incarnation, w.joining) for w in scene.plan("b").workers] == [(3, 4, False), (2, 5, True)]
    assert scene.plan("a").workers == started(hosts=2, slots=2).plan("a").workers


def die_in_slot_0(scene: Scene, at: int, how=Scene.kill, **more) -> None:
    """Whoever is in slot 0 dies at this step; its replacement is started and admitted."""
    scene.step(at)
    victim = next(w.incarnation for w in scene.plan().workers if w.slot == 0)
    how(scene, victim, **more)
    scene.obey()
    scene.tick(31.0)
    scene.obey()
    for number in scene.joining:
        scene.set(number, offers=CALL)
    scene.obey()


def test_deaths_ten_steps_apart_never_count():
    scene = started(max_restarts=0)
    for step in range(10, 200, 10):
        die_in_slot_0(scene, step)
        assert len(scene.group) == 3
    assert scene.state.deaths == 0


def test_deaths_in_quick_succession_spend_the_budget_and_the_rest_goes_on():
    scene = started(max_restarts=1)
    for _ in range(2):
        die_in_slot_0(scene, 5)
    assert (scene.state.deaths, len(scene.group)) == (1, 3)
    die_in_slot_0(scene, 5)
    assert (scene.state.deaths, len(scene.group), scene.joining) == (2, 2, [])
    assert scene.state.phase == "running"


def test_the_same_exception_at_the_same_step_counts_however_far_apart():
    scene = started(max_restarts=0)
    die_in_slot_0(scene, 20, Scene.raise_, step=20)
    assert len(scene.group) == 3
    die_in_slot_0(scene, 40, Scene.raise_, step=20)
    assert (scene.state.deaths, len(scene.group)) == (1, 2)


def test_a_slot_that_dies_again_and_again_is_filled_more_and_more_slowly():
    scene = started(max_restarts=9)
    waits = []
    for _ in range(4):
        scene.obey()
        victim = next(w.incarnation for w in scene.plan().workers if w.slot == 0)
        scene.kill(victim)
        waited = 0.0
        while not scene.joining:
            scene.tick(0.25)
            waited += 0.25
        waits.append(waited)
    assert waits == [0.0, 0.5, 1.0, 2.0]


@pytest.mark.parametrize(("error", "bases", "code"), [("UsageError", [], 2), ("X", [], 3), ("BadLoss", ["BadLoss"], 1)])
def test_errors_that_another_try_cannot_change_end_the_run_at_once(error, bases, code):
    scene = started()
    scene.step(50)
    scene.raise_(2, error, code, bases=bases, step=50)
    assert scene.state.phase == "stopping"
    scene.held["a"] = scene.generation
    for number in (1, 3):
        scene.kill(number, kind="stopped")
    assert (scene.state.phase, scene.state.outcome.exit_code) == ("ended", code)
    assert scene.state.outcome.failure.first.error == error


def test_a_newcomer_that_cannot_run_is_not_tried_again_and_does_not_end_the_run():
    scene = started()
    scene.kill(2)
    scene.obey()
    scene.raise_(4, "EnvironmentProblem", 3)
    scene.tick(60.0)
    assert (scene.state.phase, scene.joining, scene.group) == ("running", [], [1, 3])


# ---- joining -----------------------------------------------------------------------------------------------------


def test_a_worker_that_offers_itself_at_the_members_call_is_appended():
    scene = started()
    scene.kill(1)
    scene.obey()
    scene.set(4, offers=CALL)
    plan = scene.plan()
    assert (scene.generation, scene.group, plan.lost, plan.call) == ("7.3", [2, 3, 4], False, CALL)
    assert plan.why == "1 joined"
    assert not any(worker.joining for worker in plan.workers)


def test_an_offer_at_an_earlier_call_is_not_taken_and_the_call_is_told():
    scene = started()
    scene.kill(1)
    scene.obey()
    for number in (2, 3):
        scene.set(number, call=2)
    scene.set(4, offers=1)
    assert scene.generation == "7.2"
    assert orders_for(scene.state, "a", 0.0).run_call == 2
    scene.set(4, offers=2)
    assert (scene.generation, scene.plan().call) == ("7.3", 2)


def test_nobody_is_admitted_while_a_member_is_still_in_an_older_generation():
    scene = started()
    scene.kill(1)
    scene.words[4] = MemberReport(rank=0, incarnation=4, status="live", pid=104, offers=CALL)
    scene.where[4] = "a"
    scene.set(2, generation="7.2")
    assert scene.generation == "7.2", "worker 3 still speaks for 7.1"
    scene.set(3, generation="7.2")
    assert scene.generation == "7.3"


def test_joins_within_a_second_are_admitted_together():
    scene = started()
    scene.kill(1)
    scene.kill(2)
    scene.obey()
    first, second = scene.joining
    scene.set(first, offers=CALL)
    scene.tick(0.5)
    assert scene.group == [3]
    scene.set(second, offers=CALL)
    assert scene.group == [3, first, second]


def test_a_worker_that_is_ready_waits_no_longer_than_a_second_for_others():
    scene = started()
    scene.kill(1)
    scene.kill(2)
    scene.obey()
    scene.set(scene.joining[0], offers=CALL)
    scene.tick(1.25)
    assert len(scene.group) == 2


def test_a_newcomer_without_the_runs_state_does_not_carry_the_run_alone():
    scene = started(slots=2)
    scene.step(50)
    scene.kill(1)
    scene.obey()
    scene.set(3, offers=CALL)
    scene.obey()
    assert scene.group == [2, 3]
    scene.kill(2)
    assert scene.state.phase == "stopping", "the newcomer never said that it has reached step 50"


def test_a_newcomer_that_has_caught_up_carries_the_run():
    scene = started(slots=2)
    scene.step(50)
    scene.kill(1)
    scene.obey()
    scene.set(3, offers=CALL)
    scene.obey()
    scene.step(51)
    scene.kill(2)
    assert (scene.state.phase, scene.group) == ("running", [3])


# ---- scaling -----------------------------------------------------------------------------------------------------


def scale(scene: Scene, number: int) -> None:
    scene.extra["a"] = {**scene.extra.get("a", {}), "workers_wanted": number}
    scene.say("a")


def test_scaling_up_adds_slots_where_there_are_fewest_with_the_lowest_free_numbers():
    scene = Scene(hosts=1, slots=3)
    scene.slots["b"] = 1
    scene.say("b")
    scene.obey()
    assert [(w.slot, w.joining) for w in scene.plan("b").workers] == [(3, True)], "a host that joins brings its slots"
    scale(scene, 6)
    assert [w.slot for w in scene.plan("b").workers] == [3, 4, 5]
    assert [w.slot for w in scene.plan("a").workers] == [0, 1, 2]


def test_scaling_stops_at_the_bounds():
    scene = started(elastic=(2, 4))
    scale(scene, 100)
    assert len(scene.plan().workers) == 4
    scale(scene, 0)
    assert len(scene.group) == 2


def test_asking_for_workers_tries_slots_again_that_were_given_up_on():
    scene = started(max_restarts=0)
    for _ in range(2):
        die_in_slot_0(scene, 5)
    assert (len(scene.group), scene.joining) == (2, [])
    scale(scene, 3)
    assert len(scene.joining) == 1
    scene.obey()
    scene.kill(scene.joining[0])
    scene.tick(60.0)
    assert scene.joining == [], "repeating the same number is not asking again"


def test_only_the_launching_agent_scales():
    scene = started(hosts=2, slots=2)
    scene.say("b", workers_wanted=1)
    assert scene.generation == "7.1"


def test_scaling_down_dismisses_the_highest_ranks():
    scene = started(slots=4)
    scale(scene, 2)
    plan = scene.plan()
    assert (scene.group, plan.dismissed, plan.lost, plan.why) == ([1, 2], [3, 4], False, "2 left")
    assert [worker.incarnation for worker in plan.workers] == [1, 2]
    scene.obey()
    for number in (3, 4):
        scene.set(number, status="left", ended=True, exit_code=0)
    assert scene.plan().dismissed == []
    assert (scene.state.deaths, scene.joining, scene.generation) == (0, [], "7.2")


def test_a_dismissed_worker_that_dies_before_it_could_leave_makes_the_others_go_over_at_once():
    scene = started(hosts=2, slots=2)
    scale(scene, 2)
    assert (scene.generation, scene.plan().lost) == ("7.2", False)
    scene.set(3, status="left", ended=True, exit_code=0)
    assert scene.generation == "7.2", "it left after that step's end"
    scene.set(4, status="left", ended=True, exit_code=-9)
    assert (scene.generation, scene.group, scene.plan().lost) == ("7.3", [1, 2], True), "a step waits for it in vain"


def test_a_dismissed_worker_whose_host_goes_silent_before_it_could_leave_does_the_same():
    scene = started(hosts=2, slots=2)
    scale(scene, 2)
    scene.tick(6.0, "b")
    assert (scene.generation, scene.group, scene.plan().lost) == ("7.3", [1, 2], True)


def test_a_dismissed_worker_that_dies_after_the_others_went_over_changes_nothing():
    scene = started(hosts=2, slots=2)
    scale(scene, 2)
    scene.obey()
    scene.kill(4)
    assert scene.generation == "7.2"


def test_a_chief_that_was_done_before_it_heard_of_its_dismissal_has_finished_the_run():
    scene = started(hosts=2, slots=1)
    chief, other = scene.group
    scene.state = replace(scene.state, hosts={**scene.state.hosts, "a": replace(scene.state.hosts["a"], leaving=True)})
    scene.say("b")
    assert (scene.group, scene.plan("a").dismissed) == ([other], [chief])
    scene.set(chief, status="left", ended=True, exit_code=0)
    scene.set(other, status="done", ended=True, exit_code=0)
    for agent in "ab":
        scene.held[agent] = scene.generation
    scene.tick(0.25)
    assert (scene.state.phase, scene.state.outcome.exit_code) == ("ended", 0)


def test_scaling_down_takes_those_who_are_not_in_yet_first():
    scene = started()
    scale(scene, 5)
    scene.obey()
    assert scene.joining == [4, 5]
    scale(scene, 3)
    assert (scene.joining, scene.group, scene.generation) == ([], [1, 2, 3], "7.1")


def test_a_slot_is_not_given_again_before_its_dismissed_worker_has_gone():
    scene = started(slots=3, elastic=(1, 3))
    scale(scene, 2)
    scene.obey()
    scale(scene, 3)
    assert scene.joining == []
    scene.set(3, status="left", ended=True)
    assert [worker.slot for worker in scene.state.roster.joining] == [2]


def test_an_agent_that_goes_has_its_members_dismissed_and_not_replaced_there():
    scene = started(hosts=2, slots=2)
    scene.extra["b"] = {"leaving": True}
    scene.say("b")
    plan = scene.plan("b")
    assert (scene.group, plan.dismissed, plan.lost, plan.workers) == ([1, 2], [3, 4], False, [])
    scene.tick(5.0)
    assert scene.joining == []
    for number in (3, 4):
        scene.words[number] = replace(scene.words[number], status="left", ended=True)
    scene.say("b")
    assert list(scene.state.hosts) == ["a"]
    assert scene.state.phase == "running"


def test_an_agent_that_is_gone_without_having_been_asked_loses_its_members():
    scene = started(hosts=2, slots=2)
    scene.held["b"] = scene.generation
    for number in (3, 4):
        scene.words[number] = replace(scene.words[number], status="failed", ended=True)
    scene.say("b", leaving=True)
    assert (scene.group, scene.plan().lost, scene.joining) == ([1, 2], True, [])


def test_more_hosts_than_wanted_may_join_up_to_the_upper_bound():
    scene = started(elastic=(1, 3))
    for name in "bc":
        scene.slots[name] = 1
        scene.say(name)
    _, (refusal,) = react(scene.state, Heard(report=report("d")), 0.0)
    assert isinstance(refusal, Refuse)


# ---- the end -----------------------------------------------------------------------------------------------------


def end_all(scene: Scene) -> None:
    for agent in scene.slots:
        scene.held[agent] = scene.generation
    for number in list(scene.words):
        if not scene.words[number].ended:
            scene.kill(number, kind="stopped")
    scene.tick(0.25)


def test_when_all_members_are_gone_the_attempt_is_over_and_the_run_restarts():
    scene = started(slots=2)
    scene.step(30)
    scene.kill(1)
    scene.obey()
    scene.kill(2)
    assert orders_for(scene.state, "a", 0.0).do == "stop"
    end_all(scene)
    assert (scene.state.phase, scene.state.roster.attempt, scene.generation) == ("running", 2, "7.3")
    assert scene.group == [4, 5], "the worker that was joining is not among them: the attempt is new"


def test_the_run_ends_when_the_living_are_done_and_newcomers_are_killed():
    scene = started(slots=2)
    scene.kill(2)
    scene.obey()
    assert scene.joining == [3]
    scene.set(1, status="done", ended=True, exit_code=0)
    assert orders_for(scene.state, "a", 0.0).do == "stop"
    end_all(scene)
    assert (scene.state.phase, scene.state.outcome.exit_code) == ("ended", 0)


def test_a_chief_that_dies_after_the_others_were_done_has_not_finished_the_run():
    scene = started(slots=2)
    scene.step(30)
    scene.set(2, status="done", ended=True, exit_code=0)
    scene.kill(1)
    end_all(scene)
    assert scene.state.roster.attempt == 2


def test_nor_has_one_that_was_done_before_it_knew_that_it_had_become_the_chief():
    scene = started(slots=2)
    scene.step(30)
    scene.kill(1)
    assert (scene.generation, scene.group) == ("7.2", [2])
    scene.set(2, status="done", ended=True, exit_code=0)
    end_all(scene)
    assert scene.state.roster.attempt == 2, "its last word was for 7.1, where worker 1 was the chief"
    assert scene.plan().why.startswith("rank 0 on h (pid 101) died: SIGKILL; restarting")


def test_a_run_whose_chief_was_done_is_finished_when_the_others_are_however_late_that_is_heard():
    scene = started(slots=2)
    scene.set(1, status="done", ended=True, exit_code=0)
    scene.tick(6.0)
    assert (scene.generation, scene.group) == ("7.2", [2])
    scene.set(2, status="done", ended=True, exit_code=0)
    end_all(scene)
    assert (scene.state.phase, scene.state.outcome.exit_code) == ("ended", 0)


def test_a_run_that_is_done_does_not_wait_for_a_host_that_went_silent():
    scene = started(hosts=2, slots=1)
    scene.tick(6.0, "b")
    scene.obey("b")
    scene.held["a"] = scene.generation
    scene.set(1, status="done", ended=True, exit_code=0)
    assert (scene.state.phase, scene.state.outcome.exit_code) == ("ended", 0)


def test_a_stop_admits_and_replaces_nobody_and_ends_with_75():
    scene = started(slots=3, elastic=(2, 8))
    scene.extra["a"] = {"stop": "preempt", "stop_signal": 15}
    scene.kill(2)
    scene.kill(3)
    assert (scene.group, scene.joining) == ([1], []), "who is left gets a group to commit in, however few"
    scene.obey()
    scene.held["a"] = scene.generation
    scene.set(1, status="done", ended=True, exit_code=75)
    assert (scene.state.phase, scene.state.outcome.exit_code) == ("ended", 75)


def test_a_member_that_was_not_started_before_a_stop_is_not_waited_for():
    scene = Scene(hosts=2, slots=1)
    scene.obey("b")
    scene.extra["a"] = {"stop": "preempt", "stop_signal": 15}
    scene.say("a")
    scene.say("b", generation="7.1")
    assert (scene.group, scene.plan().lost) == ([1], True), "it commits without the other"
    scene.obey("b")
    scene.set(1, status="done", ended=True, exit_code=75)
    scene.say("b", generation="7.2")
    assert (scene.state.phase, scene.state.outcome.exit_code) == ("ended", 75)


# ---- restarts of the coordinator, and zombies --------------------------------------------------------------------


def test_a_restarted_coordinator_issues_no_generation_unless_membership_differs():
    scene = started(hosts=2, slots=2)
    scene.state = restored(msgspec.json.decode(msgspec.json.encode(scene.state), type=Membership), 8, scene.now)
    scene.tick(10.0)
    assert (scene.generation, scene.joining, orders_for(scene.state, "a", 0.0).term) == ("7.1", [], 8)
    scene.kill(1)
    assert (scene.generation, scene.joining) == ("8.2", [5])


def test_what_was_heard_and_not_decided_is_heard_again_after_a_restart():
    scene = started(slots=3, elastic=(3, 3))
    disk = scene.state
    scene.set(2, status="failed")
    scene.state = restored(disk, 8, scene.now)
    scene.kill(2)
    assert scene.joining == [4]


def test_a_worker_that_was_declared_gone_is_refused_and_in_no_plan():
    scene = started(hosts=2, slots=2)
    scene.tick(6.0, "b")
    assert scene.group == [1, 2]
    stale = scene.state.stale
    scene.say("b")
    assert scene.state.stale == stale + 2
    assert [(w.slot, w.incarnation, w.joining) for w in scene.plan("b").workers] == [(2, 5, True), (3, 6, True)]
    assert scene.group == [1, 2]


def test_a_late_report_takes_nothing_back():
    scene = started(slots=3)
    before = scene.words[2]
    scene.kill(2)
    scene.words[2] = before
    scene.say("a")
    assert scene.group == [1, 3]


def test_orders_of_a_later_state_have_a_higher_revision():
    scene = started()
    before = orders_for(scene.state, "a", 0.0).revision
    scene.kill(1)
    assert orders_for(scene.state, "a", 0.0).revision > before


# ---- the stores --------------------------------------------------------------------------------------------------


def ask(op: str, generation: str, ticket: int = 1) -> StoreRequest:
    return StoreRequest(
        generation=generation, incarnation=1, ticket=ticket, op=op, keys=["k"], value=b"v", timeout_s=9.0
    )


def test_each_open_generation_has_a_store_of_its_own_and_closing_one_answers_those_who_wait():
    stores, client = Stores(), ("ipc", b"w")
    list(stores.keep(["7.1"]))
    assert list(stores.handle(client, ask("get", "7.1"), 0.0)) == []
    assert list(stores.keep(["7.1", "7.2"])) == []
    list(stores.handle(client, ask("set", "7.2"), 0.0))
    assert list(stores.due(0.0)) == [], "a value of 7.2 is not one of 7.1"
    ((to, reply),) = stores.keep(["7.2"])
    assert (to, reply.ok, reply.error) == (client, False, "generation 7.1 is over")
    ((_, reply),) = stores.handle(client, ask("get", "7.1"), 0.0)
    assert not reply.ok
