"""What one server has applied: each slice of each step counts once, in any order and however often it is sent."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from manyhands.parameter_server.protocol.leases import WINDOW, Interval, Item, ServerProgress
from manyhands.parameter_server.protocol.shard import Shard, SliceGradient


def interval(*, whole: bool = False, last: int = 6) -> Interval:
    return Interval(call=1, first=1, last=last, start_row=0, num_rows=10, batch_size=4, slices=2, whole=whole)


def in_order(**more) -> Shard:
    return Shard(interval(), in_order=True, **{"low": 0, **more})


def on_arrival(**more) -> Shard:
    return Shard(interval(whole=True), in_order=False, **{"low": 0, **more})


def gradient(step: int, place: int = 0, filling: int = 1) -> SliceGradient:
    return SliceGradient(step, place, 0, filling, 7, step - 1, 1.0, 1.0, (), b"")


def test_in_order_a_step_is_due_when_all_its_slices_are_there_in_their_order():
    shard = in_order()
    assert shard.fill(gradient(1, 1))
    assert shard.due() is None
    assert shard.fill(gradient(1, 0))
    assert shard.due() == [gradient(1, 0), gradient(1, 1)]


def test_in_order_a_step_waits_for_the_one_before():
    shard = in_order()
    for place in (0, 1):
        shard.fill(gradient(2, place))
    assert shard.due() is None
    for place in (0, 1):
        shard.fill(gradient(1, place))
    assert [one.step for one in shard.due()] == [1, 1]
    shard.applied(1)
    assert [one.step for one in shard.due()] == [2, 2]


def test_a_short_last_batch_is_due_with_fewer_slices():
    shard = in_order(low=2)
    assert shard.fill(gradient(3))
    assert shard.due() == [gradient(3)], "2 rows make 1 slice"


def test_in_async_a_step_is_due_on_arrival():
    shard = on_arrival()
    shard.fill(gradient(4))
    assert shard.due() == [gradient(4)]
    shard.applied(4)
    assert shard.due() is None
    assert (shard.low, shard.seen, shard.num_applied) == (0, {4}, 1)


def test_what_was_applied_is_not_kept_again():
    shard = on_arrival(low=2, seen=[4])
    assert not shard.fill(gradient(1))
    assert not shard.fill(gradient(4, filling=99))
    assert shard.fill(gradient(3))


def test_a_gradient_is_kept_once_and_the_later_filling_replaces_the_earlier():
    shard = in_order()
    assert shard.fill(gradient(1, 0, filling=5))
    assert not shard.fill(gradient(1, 0, filling=5))
    assert not shard.fill(gradient(1, 0, filling=4))
    assert shard.fill(gradient(1, 0, filling=6))
    shard.fill(gradient(1, 1))
    assert [one.filling for one in shard.due()] == [6, 1]


def test_steps_and_slices_that_are_not_there_are_refused():
    shard = Shard(interval(last=2 * WINDOW), in_order=True, low=0)
    assert not shard.fill(gradient(0))
    assert not shard.fill(gradient(2 * WINDOW + 1))
    assert not shard.fill(gradient(WINDOW + 1)), "too far ahead to be remembered"
    assert not shard.fill(gradient(1, place=2))
    assert not shard.fill(gradient(1, place=-1))
    assert shard.standing() == ServerProgress(0)


def test_a_gradient_whose_row_is_in_other_hands_is_waited_for_again():
    shard = in_order()
    for place in (0, 1):
        shard.fill(gradient(1, place))
    shard.drop(gradient(1, 0))
    assert shard.due() is None
    assert shard.standing().has == {Item(1, 1)}
    assert shard.fill(gradient(1, 0, filling=9))
    assert shard.due() is not None


def test_dropping_an_old_filling_leaves_the_new_one_alone():
    shard = in_order()
    shard.fill(gradient(1, 0, filling=9))
    shard.drop(gradient(1, 0, filling=5))
    shard.drop(gradient(2, 0))
    assert shard.standing().has == {Item(1, 0)}


def test_what_is_to_be_committed_is_known_before_it_counts():
    shard = on_arrival(low=0, seen=[2, 3, 5])
    assert shard.after(1) == (3, {5})
    assert (shard.low, shard.seen) == (0, {2, 3, 5})
    shard.applied(1)
    assert (shard.low, shard.seen) == (3, {5})


@given(st.permutations(range(1, 7)))
def test_in_any_order_all_steps_end_as_one_number(steps):
    shard = on_arrival()
    for number, step in enumerate(steps, 1):
        shard.applied(step)
        assert shard.num_applied == number
        assert all(shard.is_applied(one) for one in steps[:number])
        assert not any(shard.is_applied(one) for one in steps[number:])
    assert (shard.low, shard.seen) == (6, frozenset())


class AnyOrder(RuleBasedStateMachine):
    """Gradients that come in any order, twice, in several fillings; and a server that is lost now and then."""

    @initialize(ordered=st.booleans())
    def begin(self, ordered: bool) -> None:
        self.ordered, self.interval = ordered, interval(whole=not ordered)
        self.committed: tuple[int, frozenset[int]] = (0, frozenset())
        self.counts: dict[Item, int] = {}
        self.restart()

    @rule()
    def restart(self) -> None:
        low, seen = self.committed
        self.shard = Shard(self.interval, in_order=self.ordered, low=low, seen=seen)

    @rule(step=st.integers(0, 8), place=st.integers(0, 2), filling=st.integers(1, 3))
    def fill(self, step: int, place: int, filling: int) -> None:
        kept = self.shard.fill(gradient(step, place, filling))
        assert not kept or (step, place) not in self.counts

    @rule(dies=st.booleans())
    def apply(self, dies: bool) -> None:
        due = self.shard.due()
        if due is None:
            return
        step = due[0].step
        assert {one.item for one in due} == {(step, place) for place in range(self.interval.items(step))}
        self.committed = self.shard.after(step)
        for one in due:
            self.counts[one.item] = self.counts.get(one.item, 0) + 1
        if dies:
            self.restart()
        else:
            self.shard.applied(step)

    @rule(step=st.integers(1, 6), place=st.integers(0, 1), filling=st.integers(1, 3))
    def drop(self, step: int, place: int, filling: int) -> None:
        self.shard.drop(gradient(step, place, filling))

    @invariant()
    def each_counts_once_and_is_known_to(self) -> None:
        assert set(self.counts.values()) <= {1}
        standing = self.shard.standing()
        assert {step for step, _ in self.counts} == {step for step in range(1, 9) if standing.applied(step)}
        assert not any(standing.applied(step) for step, _ in standing.has)


AnyOrder.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestAnyOrderOfEvents = AnyOrder.TestCase
