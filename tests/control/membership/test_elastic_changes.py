"""Elastic attempts, decided without a process or a socket: who joins, who goes, how it ends, and begins again."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from manyhands.control.agent.user_requests import why_not_scale
from manyhands.control.coordinator.key_value_store import Stores
from manyhands.control.membership.orders import orders_for
from manyhands.control.membership.react import react, restored
from manyhands.control.membership.state import Membership, Refuse, ReportReceived
from manyhands.control.messages.agent_messages import MemberReport
from manyhands.control.messages.launch_request import LaunchRequest, WorkerCommand
from manyhands.control.messages.worker_messages import StoreRequest
from tests.control.membership.scene import CALL, Scene, die_in_slot_0, started
from tests.control.membership.test_membership import report

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


def test_an_offer_at_an_earlier_call_is_not_taken_and_the_orders_name_the_call():
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


def test_no_worker_is_admitted_while_a_member_is_still_in_an_older_generation():
    scene = started()
    scene.kill(1)
    scene.words[4] = MemberReport(pid=104, offers=CALL)
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


def in_replicas_of_two() -> Scene:
    scene = started(slots=4, elastic=(2, 4))
    scene.extra["a"] = {"replica": 2}
    scene.say("a")
    return scene


def test_replicas_of_several_workers_leave_whole_with_any_ranks():
    scene = in_replicas_of_two()
    scene.kill(1)
    scene.obey()
    scene.set(5, offers=CALL)
    scene.obey()
    assert scene.group == [2, 3, 4, 5], "the one in slot 0 has the highest rank now"
    scale(scene, 2)
    assert (scene.group, scene.plan().dismissed, scene.plan().why) == ([2, 5], [3, 4], "2 left")


def test_a_replica_that_lacks_a_worker_is_the_first_to_leave():
    scene = in_replicas_of_two()
    scene.kill(1)
    scale(scene, 2)
    scene.obey()
    scene.tick(1.0)
    assert scene.group == [3, 4] and scene.joining == []
    assert [worker.slot for worker in scene.plan().workers] == [2, 3]


def test_a_newcomer_waits_for_the_others_of_its_replica():
    scene = in_replicas_of_two()
    scale(scene, 2)
    scene.obey()
    for number in (3, 4):
        scene.set(number, status="left", ended=True, exit_code=0)
    scale(scene, 4)
    scene.obey()
    first, second = scene.joining
    scene.set(first, offers=CALL)
    scene.tick(5.0)
    assert scene.group == [1, 2]
    scene.set(second, offers=CALL)
    assert scene.group == [1, 2, first, second]


def test_a_number_that_leaves_a_replica_in_pieces_is_refused():
    request = LaunchRequest(command=WorkerCommand(kind="script", target="train.py"), elastic=(2, 8))
    refusal = why_not_scale(request, 5, None, 4, run="run", run_dir="runs/1")
    assert refusal is not None and "A replica of the model takes 4 workers" in refusal.what
    assert refusal.fix == ["mh scale runs/1 4"]
    assert why_not_scale(request, 8, None, 4, run="run", run_dir="runs/1") is None


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


def test_a_dismissed_worker_that_dies_before_it_could_leave_makes_the_others_switch_generation_at_once():
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


def test_a_chief_that_was_done_before_its_dismissal_arrived_has_finished_the_run():
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
    _, (refusal,) = react(scene.state, ReportReceived(report=report("d")), 0.0)
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


def test_a_run_whose_chief_was_done_is_finished_when_the_others_are_however_late_they_report():
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


def test_a_stop_admits_and_replaces_no_worker_and_ends_with_75():
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


def test_reports_that_led_to_no_decision_are_received_again_after_a_restart():
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


def test_each_open_generation_has_its_own_store_and_closing_one_answers_those_who_wait():
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
