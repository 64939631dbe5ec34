"""The membership machine, without a process or a socket in sight."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from manyhands.control.membership.orders import orders_for
from manyhands.control.membership.react import begin, parse_generation, react, restored
from manyhands.control.membership.state import (
    Membership,
    MembershipSettings,
    Persist,
    Refuse,
    ReportReceived,
    SendOrders,
    Ticked,
)
from manyhands.control.messages.agent_messages import CheckpointCommit, HostReport, JobDescription, MemberReport
from manyhands.control.messages.failure import WorkerEnd
from manyhands.control.messages.launch_request import WorkerCommand

VERSIONS = {"python": "3.11", "torch": "2.13.0"}
JOB = JobDescription(command=WorkerCommand("script", "train.py"), flags={}, grace_s=1.0, max_restarts=2)


def settings_for(hosts: int = 1, **more) -> MembershipSettings:
    return MembershipSettings(run="r", job=JOB, versions=VERSIONS, hosts_wanted=hosts, **more)


def report(agent: str = "a", **more) -> HostReport:
    fields = {
        "run": "r",
        "host": f"host-{agent}",
        "slots": 2,
        "term": 0,
        "versions": VERSIONS,
        "data_address": "127.0.0.1",
        "local": agent == "a",
        "master": ("127.0.0.1", 1),
    }
    return HostReport(agent=agent, **{**fields, **more, "members": dict(more.get("members", []))})


def member(rank: int, incarnation: int, status: str = "live", **more) -> tuple[int, MemberReport]:
    return incarnation, MemberReport(status=status, pid=100 + rank, **more)


def killed(rank: int, incarnation: int, step: int | None = None) -> tuple[int, MemberReport]:
    end = WorkerEnd(rank=rank, host="h", pid=1, kind="signal", signal=9, step=step)
    return member(rank, incarnation, "failed", exit_code=-9, end=end, step=step)


def receive(state: Membership, *reports: HostReport, now: float = 0.0) -> Membership:
    for each in reports:
        state, _ = react(state, ReportReceived(report=each), now)
    return state


def running(hosts: int = 1, **more) -> Membership:
    state = begin(settings_for(hosts, **more), term=7, now=0.0)
    return receive(state, *[report(name) for name in "abcdef"[:hosts]])


def test_a_generation_is_formed_when_every_host_is_there():
    state = begin(settings_for(2), term=7, now=0.0)
    state = receive(state, report("a"))
    assert state.phase == "gathering"
    state = receive(state, report("b", slots=3))
    assert state.phase == "running"
    assert state.roster.generation == "7.1"
    assert [(m.rank, m.agent) for m in state.roster.members] == [(0, "a"), (1, "a"), (2, "b"), (3, "b"), (4, "b")]


def test_ranks_follow_the_host_rank_that_was_asked_for_and_not_the_order_of_arrival():
    state = begin(settings_for(3), term=1, now=0.0)
    state = receive(state, report("a", host_rank=0), report("c", host_rank=2), report("b", host_rank=1))
    assert state.roster.agents == ("a", "b", "c")


def test_a_generation_is_on_disk_before_it_is_announced():
    state = begin(settings_for(), term=7, now=0.0)
    state, outputs = react(state, ReportReceived(report=report()), 0.0)
    assert isinstance(outputs[0], Persist)
    assert outputs[0].state.roster.generation == "7.1"
    assert outputs[1:] == [SendOrders(agent="a")]


def test_a_plan_has_each_hosts_part():
    state = running(2)
    plan = orders_for(state, "b", 0.0).plan
    assert (plan.first_rank, plan.world_size, plan.host, plan.num_hosts, plan.attempt) == (2, 4, 1, 2, 1)
    assert plan.incarnations == [3, 4]


def test_one_death_stops_every_host():
    state = receive(running(2), report("b", generation="7.1", members=[killed(2, 3), member(3, 4)], clear=False))
    assert state.phase == "stopping"
    assert orders_for(state, "a", 0.0).do == "stop"
    assert orders_for(state, "b", 0.0).do == "stop"


def test_a_new_generation_waits_for_every_agents_word_that_the_old_one_is_dead():
    state = receive(running(2), report("b", generation="7.1", members=[killed(2, 3), killed(3, 4)], clear=True))
    assert state.phase == "stopping"
    state = receive(state, report("a", generation="7.1", members=[member(0, 1), member(1, 2)], clear=False))
    assert state.phase == "stopping"
    state = receive(state, report("a", generation="7.1", members=[killed(0, 1), killed(1, 2)], clear=True))
    assert state.roster.generation == "7.2"
    assert [m.incarnation for m in state.roster.members] == [5, 6, 7, 8]


def test_word_about_an_older_generation_is_not_word_about_this_one():
    state = receive(running(2), report("b", generation="7.1", members=[killed(2, 3), killed(3, 4)], clear=True))
    state = receive(state, report("a", generation=None, clear=True))
    state = receive(state, report("a", generation="6.9", members=[killed(0, 1)], clear=True))
    assert state.phase == "stopping"
    assert state.stale == 1


def test_a_member_of_an_older_incarnation_is_not_believed():
    state = receive(running(), report(generation="7.1", members=[killed(0, 99)], clear=False))
    assert state.phase == "running"
    assert state.stale == 1


def crash(
    state: Membership, step: int | None = None, now: float = 0.0, committed: CheckpointCommit | None = None
) -> Membership:
    generation = state.roster.generation
    first = state.roster.members[0].incarnation
    members = [killed(0, first, step), killed(1, first + 1, step)]
    return receive(state, report(generation=generation, members=members, clear=True, committed=committed), now=now)


def test_signal_deaths_restart_until_the_budget_is_spent_and_then_end_with_4():
    state = running()
    for attempt in (2, 3):
        state = crash(state)
        assert (state.phase, state.roster.attempt) == ("running", attempt)
    state = crash(state)
    assert state.phase == "ended"
    assert state.outcome.exit_code == 4
    assert state.outcome.failure.attempt == 3
    assert "budget of 2" in state.outcome.failure.reason


def test_a_restart_says_who_died_and_where_it_resumes():
    state = crash(running(), committed=CheckpointCommit(step=1800, path="p"))
    assert orders_for(state, "a", 0.0).plan.why == (
        "rank 0 on h (pid 1) died: SIGKILL; restarting from step 1800, attempt 2 of 3"
    )


def done(*codes: int) -> HostReport:
    members = [member(rank, rank + 1, "done", exit_code=code) for rank, code in enumerate(codes)]
    return report(generation="7.1", members=members, clear=True)


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((75, 75), 75), ((0, 75), 75)])
def test_workers_that_end_well_end_the_run(codes, expected):
    state = receive(running(), done(*codes))
    assert state.phase == "ended"
    assert state.outcome.exit_code == expected
    assert state.outcome.failure is None


def test_a_stop_reaches_every_host_and_never_restarts():
    state = running(2)
    state, outputs = react(
        state, ReportReceived(report=report("b", generation="7.1", stop="preempt", stop_signal=15, clear=False)), 0
    )
    assert {output.agent for output in outputs} == {"a", "b"}
    assert orders_for(state, "a", 0.0).stop == "preempt"
    state = receive(state, report("a", generation="7.1", members=[killed(0, 1), killed(1, 2)], clear=True))
    assert state.phase == "running", "a death during a stop leaves the others their grace time"
    state = receive(state, report("b", generation="7.1", members=[killed(2, 3), killed(3, 4)], clear=True))
    assert (state.phase, state.outcome.exit_code) == ("ended", 143)


def test_a_stop_with_the_chiefs_checkpoint_ends_with_75():
    state = receive(running(), report(stop="preempt", stop_signal=2, generation="7.1", clear=False))
    members = [member(0, 1, "done", exit_code=75), killed(1, 2)]
    state = receive(state, report(generation="7.1", members=members, clear=True))
    assert state.outcome.exit_code == 75


def test_a_stop_before_the_first_generation_starts_nothing():
    state = begin(settings_for(2), term=1, now=0.0)
    state = receive(state, report("a", stop="preempt", stop_signal=2))
    assert (state.phase, state.outcome.exit_code) == ("ended", 130)


def test_a_silent_host_stops_the_others_and_its_members_are_suspect_not_dead():
    state = running(2)
    state = receive(state, report("a", generation="7.1", members=[member(0, 1), member(1, 2)], clear=False), now=4.0)
    state, _ = react(state, Ticked(), 5.5)
    assert state.phase == "stopping"
    assert [m.status for m in state.roster.members] == ["live", "live", "suspect", "suspect"]


def test_a_lost_host_that_comes_back_and_gives_its_word_lets_the_run_restart():
    state, _ = react(running(2), Ticked(), 5.5)
    state = receive(state, report("a", generation="7.1", members=[killed(0, 1), killed(1, 2)], clear=True), now=6.0)
    assert state.phase == "stopping"
    state = receive(state, report("b", generation="7.1", members=[killed(2, 3), killed(3, 4)], clear=True), now=9.0)
    assert state.roster.generation == "7.2"


def test_a_lost_host_that_stays_away_ends_the_run_with_4():
    state, _ = react(running(2), Ticked(), 5.5)
    state = receive(state, report("a", generation="7.1", members=[killed(0, 1), killed(1, 2)], clear=True), now=6.0)
    state, _ = react(state, Ticked(), 62.0)
    assert (state.phase, state.outcome.exit_code) == ("ended", 4)
    assert "host-b" in state.outcome.reason


def test_an_agent_that_leaves_gives_its_word_and_another_host_may_take_its_place():
    state = receive(
        running(2), report("b", generation="7.1", members=[killed(2, 3), killed(3, 4)], clear=True, leaving=True)
    )
    assert (state.phase, list(state.hosts)) == ("stopping", ["a"])
    state = receive(state, report("a", generation="7.1", members=[killed(0, 1), killed(1, 2)], clear=True))
    assert state.phase == "gathering"
    state = receive(state, report("c"))
    assert (state.roster.generation, state.roster.agents) == ("7.2", ("a", "c"))


def test_the_coordinators_own_host_cannot_be_silent():
    state, _ = react(running(), Ticked(), 1000.0)
    assert state.phase == "running"


def test_too_few_hosts_in_time_end_with_3():
    state = receive(begin(settings_for(2), term=1, now=0.0), report("a"))
    state, _ = react(state, Ticked(), 301.0)
    assert state.outcome.exit_code == 3
    assert "1 of 2 hosts joined" in state.outcome.reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"run": "other"}, "not other"),
        ({"versions": {**VERSIONS, "torch": "2.12.0"}}, "has torch 2.12.0, the run has torch 2.13.0"),
        ({"host_rank": 0}, "already"),
    ],
)
def test_a_host_that_does_not_fit_is_refused_by_name(change, words):
    state = receive(begin(settings_for(3), term=1, now=0.0), report("a", host_rank=0))
    state, (refusal,) = react(state, ReportReceived(report=report("b", **change)), 0.0)
    assert isinstance(refusal, Refuse)
    assert words in refusal.what
    assert "b" not in state.hosts


def test_a_host_that_waits_learns_for_whom():
    state = receive(begin(settings_for(3), term=7, now=0.0), report("a", host_rank=0), report("b", host_rank=2))
    assert orders_for(state, "a", 0.0).waiting_for == "2 of 3 hosts have joined; missing: host 1"
    unnumbered = receive(begin(settings_for(2), term=7, now=0.0), report("a"))
    assert orders_for(unnumbered, "a", 0.0).waiting_for == "1 of 2 hosts has joined"
    assert orders_for(running(1), "a", 0.0).waiting_for == ""


def test_a_host_too_many_is_refused():
    _, (refusal,) = react(running(1), ReportReceived(report=report("z")), 0.0)
    assert "all 1 of its hosts" in refusal.what


def test_a_restarted_coordinator_continues_the_generation_and_never_repeats_one():
    state = msgspec.json.decode(msgspec.json.encode(running()), type=Membership)
    state = restored(state, 8, now=50.0)
    assert orders_for(state, "a", 50.0).plan.generation == "7.1"
    state = crash(state, now=51.0)
    assert state.roster.generation == "8.2"
    assert orders_for(state, "a", 51.0).term == 8


def raised(
    rank: int, incarnation: int, step: int, error: str = "ValueError", code: int = 1
) -> tuple[int, MemberReport]:
    end = WorkerEnd(rank=rank, host="h", pid=1, kind="exception", error=error, message="no", step=step, exit_code=code)
    return member(rank, incarnation, "failed", exit_code=code, end=end, step=step)


def crash_with(state: Membership, *, start: int, step: int, **more) -> Membership:
    generation, first = state.roster.generation, state.roster.members[0].incarnation
    state = receive(
        state, report(generation=generation, members=[member(0, first, first_step=start, step=start)], clear=False)
    )
    members = [raised(0, first, step, **more), killed(1, first + 1)]
    return receive(state, report(generation=generation, members=members, clear=True))


def test_an_exception_before_the_attempts_first_step_is_not_retried():
    state = crash_with(running(), start=0, step=0)
    assert (state.phase, state.outcome.exit_code) == ("ended", 1)


def test_an_exception_after_some_steps_is_retried():
    state = crash_with(running(), start=0, step=5)
    assert state.roster.attempt == 2


def test_the_same_exception_at_the_same_step_three_times_ends_the_run_before_the_budget_does():
    state = running()
    state = replace(state, settings=replace(state.settings, job=replace(JOB, max_restarts=10)))
    for attempt in (2, 3):
        state = crash_with(state, start=0, step=5)
        assert state.roster.attempt == attempt
    state = crash_with(state, start=0, step=5)
    assert (state.phase, state.outcome.exit_code) == ("ended", 1)
    assert "3 times" in state.outcome.failure.reason


@pytest.mark.parametrize("code", [2, 3])
def test_usage_and_environment_errors_pass_through_without_a_retry(code):
    state = crash_with(running(), start=0, step=5, code=code)
    assert (state.phase, state.outcome.exit_code) == ("ended", code)


# ---- any order of events -----------------------------------------------------------------------------------------


class Simulated:
    """Agents that obey the orders that reach them, when they reach them; their processes are plain sets."""

    def __init__(self, hosts: int) -> None:
        self.names = "abc"[:hosts]
        self.state = begin(settings_for(hosts), term=1, now=0.0)
        self.log = self.state
        self.now = 0.0
        self.generation: dict[str, str | None] = dict.fromkeys(self.names)
        self.alive: dict[str, set[tuple[int, int]]] = {name: set() for name in self.names}
        self.members: dict[str, dict[int, MemberReport]] = {name: {} for name in self.names}
        self.seen: list[str] = []
        self.newest = 0
        self.ended: set[str] = set()

    def apply(self, state: Membership, outputs: list) -> None:
        self.state = state
        for output in outputs:
            if isinstance(output, Persist):
                self.log = output.state
                roster = output.state.roster
                if roster is not None and roster.members[0].incarnation > self.newest:
                    self.newest = roster.members[0].incarnation
                    self.formed(roster.generation)

    def formed(self, generation: str) -> None:
        assert generation not in self.seen, "a generation was repeated"
        assert not self.seen or parse_generation(generation) > parse_generation(self.seen[-1])
        assert not any(self.alive.values()), "two generations were alive at once"
        self.seen.append(generation)
        assert len(self.seen) <= JOB.max_restarts + 1, "the restart budget was exceeded"

    def do(self, action: str, name: str) -> None:
        self.now += 0.1
        match action:
            case "report":
                clear = not self.alive[name]
                word = report(name, generation=self.generation[name], members=self.members[name], clear=clear)
                self.apply(*react(self.state, ReportReceived(report=word), self.now))
            case "orders":
                self.obey(name)
            case "round":
                for each in self.names:
                    self.do("orders", each)
                    self.do("report", each)
            case "kill":
                self.die(name, 1)
            case "restart":
                self.state = restored(self.log, self.state.term + 1, self.now)
                self.log = self.state
            case "silence":
                self.now += 6.0
                self.apply(*react(self.state, Ticked(), self.now))

    def obey(self, name: str) -> None:
        orders = orders_for(self.state, name, self.now)
        mine = self.generation[name]
        if orders.do == "run" and (mine is None or parse_generation(orders.plan.generation) > parse_generation(mine)):
            plan = orders.plan
            self.generation[name] = plan.generation
            ranks = list(enumerate(plan.incarnations, plan.first_rank))
            self.alive[name] = set(ranks)
            self.members[name] = dict(member(rank, incarnation) for rank, incarnation in ranks)
        elif orders.do == "stop" and orders.generation is not None:
            if mine != orders.generation:
                self.generation[name], self.members[name] = orders.generation, {}
            self.die(name, 99)

    def die(self, name: str, most: int) -> None:
        for rank, incarnation in sorted(self.alive[name])[:most]:
            self.alive[name].discard((rank, incarnation))
            self.members[name] |= dict([killed(rank, incarnation)])


WORDS = ["report", "orders", "kill", "kill", "round", "round", "round", "restart", "silence"]
ACTIONS = st.tuples(st.sampled_from(WORDS), st.integers(0, 2))


@settings(max_examples=200, deadline=None)
@given(hosts=st.integers(1, 3), actions=st.lists(ACTIONS, min_size=40, max_size=120))
def test_generations_never_repeat_never_overlap_and_keep_the_budget(hosts, actions):
    world = Simulated(hosts)
    for action, number in actions:
        world.do(action, world.names[number % hosts])


@settings(max_examples=50, deadline=None)
@given(hosts=st.integers(1, 3), actions=st.lists(ACTIONS, max_size=40))
def test_a_run_settles_once_faults_stop(hosts, actions):
    world = Simulated(hosts)
    for action, number in actions:
        world.do(action, world.names[number % hosts])
    for _ in range(30):
        for name in world.names:
            world.do("orders", name)
            world.do("report", name)
    assert world.state.phase in ("running", "ended")
