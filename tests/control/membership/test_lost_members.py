"""Elastic attempts, decided without a process or a socket: who begins, who is lost, and who replaces them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from manyhands.control.membership.orders import orders_for
from manyhands.control.membership.react import begin, react
from manyhands.control.membership.state import Persist, Refuse, ReportReceived, SendOrders
from manyhands.control.messages.failure import WorkerEnd
from tests.control.membership.scene import CALL, Scene, die_in_slot_0, started
from tests.control.membership.test_membership import report, settings_for

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


def test_orders_of_a_static_run_set_no_elastic_fields():
    state = begin(settings_for(1), term=7, now=0.0)
    state, _ = react(state, ReportReceived(report=report()), 0.0)
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


def test_a_generation_after_a_lost_worker_is_on_disk_before_it_is_announced():
    scene = started(hosts=2)
    scene.kill(1)
    first, *rest = scene.outputs
    assert isinstance(first, Persist)
    assert first.state.roster.generation == scene.generation == "7.2"
    assert rest == [SendOrders(agent="a"), SendOrders(agent="b")]


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


def test_a_silent_hosts_members_are_gone_as_soon_as_a_member_lives_elsewhere():
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


def test_members_of_a_silent_host_are_waited_for_when_no_other_lives_and_continue_when_it_comes_back():
    scene = only_a_silent_host_is_left()
    scene.set(3, offers=CALL)
    assert scene.group == [2], "there is no group that it could join"
    scene.tick(2.0)
    assert (scene.generation, scene.group) == ("7.3", [2, 3])


def test_a_silent_host_with_the_last_members_that_stays_away_ends_the_run_with_4():
    scene = only_a_silent_host_is_left()
    scene.tick(60.0, "b")
    assert (scene.state.phase, scene.state.outcome.exit_code) == ("ended", 4)
    assert "host-b did not return" in scene.state.outcome.reason


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


def test_members_that_train_long_after_one_was_done_get_a_group_without_it():
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


# ---- a group whose exchange fails --------------------------------------------------------------------------------


def test_a_group_whose_exchange_failed_although_all_live_is_formed_again():
    scene = started()
    scene.set(2, stranded=True)
    assert scene.generation == "7.1", "the death of a member may still be reported"
    scene.tick(0.75)
    assert (scene.generation, scene.group, scene.plan().lost) == ("7.2", [1, 2, 3], True)
    assert scene.plan().why == "an exchange between workers failed"


def test_no_worker_is_admitted_to_a_group_whose_exchange_failed_before_it_is_formed_again():
    """The orders would have its members switch generation at the end of a step, which they cannot reach."""
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


def test_a_worker_that_waits_for_a_generation_that_exists_is_not_stranded():
    scene = started()
    scene.kill(3)
    scene.set(2, stranded=True)
    assert scene.generation == "7.2"
    scene.tick(2.0)
    assert scene.generation == "7.2", "it just has not received it yet"


def test_a_group_whose_exchange_fails_again_and_again_ends_the_attempt():
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


def test_too_few_workers_and_none_to_come_ends_the_run_with_the_failure_block():
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


def test_deaths_with_ten_steps_between_them_never_count():
    scene = started(max_restarts=0)
    for step in range(10, 200, 10):
        die_in_slot_0(scene, step)
        assert len(scene.group) == 3
    assert scene.state.deaths == 0


def test_deaths_in_quick_succession_spend_the_budget_and_the_others_continue():
    scene = started(max_restarts=1)
    for _ in range(2):
        die_in_slot_0(scene, 5)
    assert (scene.state.deaths, len(scene.group)) == (1, 3)
    die_in_slot_0(scene, 5)
    assert (scene.state.deaths, len(scene.group), scene.joining) == (2, 2, [])
    assert scene.state.phase == "running"


def test_the_same_exception_at_the_same_step_counts_at_any_distance():
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
