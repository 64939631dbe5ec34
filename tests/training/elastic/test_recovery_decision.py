"""Which worker sends which state when a group changes, decided without a process from its members' progress."""

from __future__ import annotations

import random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from manyhands.training.elastic.recovery_decision import (
    Doing,
    WorkerProgress,
    can_join,
    decide,
    evaluation_result,
    finished_operations,
)

EVALUATED = ({"loss": 0.5}, 40)


def progress(
    step: int,
    operation: int = 0,
    *,
    call: int = 1,
    done: bool = False,
    division: str = "",
    doing: Doing = "an evaluation",
) -> WorkerProgress:
    return WorkerProgress(
        call=call,
        step=step,
        operation=operation,
        doing=doing if operation else "steps",
        done=done,
        has_state=True,
        division=division,
        result=EVALUATED if operation and done else None,
    )


NEWCOMER = WorkerProgress(call=1, step=0, operation=0, doing="steps", done=False, has_state=False, is_newcomer=True)


def test_workers_in_the_middle_of_the_same_step_continue_it() -> None:
    members = [progress(7, division="1.1") for _ in range(3)]
    source, needed, arrival = decide(members, 1)
    assert (source, needed) == (0, False)
    assert arrival.same_step and not arrival.received


def test_a_step_that_was_divided_by_different_groups_begins_anew() -> None:
    _, _, arrival = decide([progress(7, division="1.1"), progress(7, division="1.2")], 0)
    assert not arrival.same_step


def test_a_worker_one_step_behind_gets_the_state_of_one_that_is_not() -> None:
    members = [progress(7, division="1.1"), progress(8), progress(8, division="1.1")]
    source, needed, arrival = decide(members, 0)
    assert (source, needed, arrival.received) == (1, True, True)
    assert not decide(members, 2)[2].same_step, "the one behind has not begun the step that this one is in"


def test_a_newcomer_gets_the_state_and_members_keep_theirs() -> None:
    members = [progress(7, done=True), NEWCOMER]
    assert decide(members, 1)[2].received
    assert not decide(members, 0)[2].received


def test_workers_without_a_state_send_none() -> None:
    assert decide([NEWCOMER, NEWCOMER], 0)[:2] == (None, False)


def test_what_all_have_the_result_of_is_not_done_again() -> None:
    members = [progress(7, 2, done=True), progress(7, 2, done=True), progress(7, 3)]
    assert decide(members, 0)[2].all_done, "the third is past it"
    assert not decide(members, 2)[2].all_done


def test_nor_if_the_others_have_begun_the_next_step() -> None:
    members = [progress(7, 2, done=True), progress(7, 2, doing="steps", division="1.1")]
    assert decide(members, 0)[2].all_done, "an exchange may fail for one, and not for the others"


def test_what_one_lacks_the_result_of_is_done_again_by_all() -> None:
    members = [progress(7, 2, done=True), progress(7, 2)]
    assert not decide(members, 0)[2].all_done
    assert not decide(members, 1)[2].all_done


def test_a_newcomer_receives_a_result_that_is_not_computed_again_and_else_computes_its_part() -> None:
    done, past = progress(7, 1, done=True), progress(7, 2)
    for members in ([done, done], [done, past]):
        assert decide([*members, NEWCOMER], 0)[2].all_done
        assert evaluation_result([*members, NEWCOMER], done) == EVALUATED
    assert not decide([done, progress(7, 1), NEWCOMER], 0)[2].all_done
    assert evaluation_result([done, progress(7, 1), NEWCOMER], done) is None
    assert evaluation_result([between := progress(7), NEWCOMER], between) is None, (
        "between two steps there is no result to send"
    )


def test_a_newcomer_has_behind_it_what_the_one_has_whose_state_it_gets() -> None:
    """What all workers do together is numbered; one that counted otherwise would never be where the others are."""
    assert finished_operations(progress(7)) == 0
    assert finished_operations(progress(7, 2, doing="steps")) == 2, "done, and then admitted"
    assert finished_operations(progress(7, 2, doing="an evaluation")) == 1, (
        "which it computes with the others, or receives"
    )


def test_the_state_of_the_one_who_has_come_farthest_is_given() -> None:
    members = [NEWCOMER, progress(6, 5), progress(7, 1, done=True), progress(7, 2), progress(7, 2)]
    assert decide(members, 0)[0] == 3


def test_newcomers_join_steps_and_evaluations_and_nothing_else() -> None:
    saving = progress(7, 1, doing="something else")
    for done, there in ((saving, saving), (saving, progress(7, 2))):
        assert can_join([done, there], done)
    assert not can_join([saving, NEWCOMER], saving)
    assert can_join([saving, progress(7, 2), NEWCOMER], progress(7, 2)), "who has come farthest is in an evaluation"
    began_with_us = msgspec.structs.replace(NEWCOMER, is_newcomer=False)
    assert can_join([saving, began_with_us], saving), "it lost a worker while it got ready, and saves next"


@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.sampled_from(["", "1.1", "1.2"])), min_size=1, max_size=5)
)
def test_all_members_make_the_same_decision(reports: list[tuple[int, bool, str]]) -> None:
    members = [
        WorkerProgress(call=1, step=step, operation=0, doing="steps", done=False, has_state=has, division=division)
        for step, has, division in reports
    ]
    decisions = [decide(members, rank) for rank in range(len(members))]
    assert len({decision[:2] for decision in decisions}) == 1
    source, needed, _ = decisions[0]
    assert needed == (source is not None and any(decision[2].received for decision in decisions))
    if source is not None:
        assert not decisions[source][2].received
        assert len({decision[2].same_step for decision in decisions}) == 1


class _Follower:
    """A worker in a script of "step" and things that all do together, as the worker's side of the protocol has it."""

    def __init__(self, script: list[Doing], at: int = 0, *, is_newcomer: bool = False) -> None:
        self.script, self.at, self.is_newcomer, self.has_result = script, at, is_newcomer, False

    @property
    def doing(self) -> Doing:
        return "steps" if self.is_newcomer else self.script[self.at]

    def succeed(self) -> None:
        """An exchange: a step has one, and anything else two, the second of which is its end."""
        if self.doing == "steps" or self.has_result:
            self.at, self.has_result = self.at + 1, False
        else:
            self.has_result = True

    def progress(self) -> WorkerProgress:
        behind = self.script[: self.at]
        since = list(reversed(behind)).index("steps") if "steps" in behind else len(behind)
        return WorkerProgress(
            call=1,
            step=behind.count("steps"),
            operation=since + (self.doing != "steps"),
            doing=self.doing,
            done=self.has_result,
            has_state=not self.is_newcomer,
            is_newcomer=self.is_newcomer,
            result=EVALUATED if self.doing == "an evaluation" and self.has_result else None,
        )

    def switch_generation(self, members: list[WorkerProgress], rank: int) -> None:
        source, _, arrival = decide(members, rank)
        assert source is not None
        giver = members[source]
        if arrival.received:
            steps = [at + 1 for at, one in enumerate(self.script) if one == "steps"]
            self.at = ([0, *steps])[giver.step] + finished_operations(giver)
            self.at += self.is_newcomer and evaluation_result(members, giver) is not None
        elif self.doing != "steps" and arrival.all_done:
            self.at += 1
        self.is_newcomer = self.has_result = False


def _play(seed: int) -> None:
    """Whichever workers receive a result: all that are there do the same next."""
    chance = random.Random(seed)
    doings: list[Doing] = ["steps", "an evaluation", "something else"]
    script = ["steps", *chance.choices(doings, k=chance.randint(1, 8)), "steps"]
    workers = [_Follower(script) for _ in range(chance.randint(1, 4))]
    for _ in range(40):
        if workers[0].at == len(script) - 1:
            return
        received = [chance.random() < 0.7 for _ in workers]
        for worker in (worker for worker, has in zip(workers, received, strict=True) if has):
            worker.succeed()
        if not all(received):  # a worker that has received it waits for the others in the next operation
            coming = [_Follower(script, is_newcomer=True)] * (len(workers) < 4 and chance.random() < 0.5)
            members = [worker.progress() for worker in (*workers, *coming)]
            source = decide(members, 0)[0]
            assert source is not None
            if can_join(members, members[source]):
                workers += coming
            members = members[: len(workers)]
            for rank, worker in enumerate(workers):
                worker.switch_generation(members, rank)
        assert len({(worker.at, worker.has_result) for worker in workers}) == 1, (
            f"seed {seed}: they do different operations"
        )


def test_workers_do_the_same_operations_in_order_whichever_result_they_missed() -> None:
    for seed in range(500):
        _play(seed)
