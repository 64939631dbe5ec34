"""Who computes what under parameter servers: decisions over plain values, and any order of events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from manyhands.parallel import leases
from manyhands.parallel.leases import Book, Course, Grant, Held, Item, Meet, Minutes, Rule, Standing

SYNC, SSP, ASYNC = Rule(ahead=0), Rule(ahead=1), Rule(ahead=None)


def course(**more) -> Course:
    fields = {"call": 1, "first": 1, "last": 6, "start_row": 0, "num_rows": 12, "batch_size": 4, "slices": 2}
    return Course(**{**fields, "whole": False, **more})


class Talk:
    """A book, and workers that send each ask once, with the tickets and the number that it wants."""

    def __init__(self, rule: Rule = SYNC, servers: int = 1, rows: int = 6, minutes: Minutes | None = None, **more):
        self.course = course(whole=rule.ahead is None, **more)
        standings = [Standing(self.course.first - 1)] * servers
        minutes = minutes or Minutes.before(self.course.first)
        self.book = Book(self.course, rule, standings, num_rows=rows, number=1, minutes=minutes)
        self._ticket = 0

    def ask(self, worker: int = 1, *holding: Held, met: int = 0, wish: int = 0) -> Grant | Meet | None:
        self._ticket += 1
        return self.book.ask(worker, self.book.number, self._ticket, met, wish, holding)

    def work(self, worker: int = 1, *holding: Held, met: int = 0) -> Held:
        answer = self.ask(worker, *holding, met=met)
        assert isinstance(answer, Grant), answer
        return answer.held

    def fill(self, worker: int = 1, *holding: Held, met: int = 0) -> Held:
        held = self.work(worker, *holding, met=met)
        assert self.book.filled(held)
        return held

    def apply(self, low: int, server: int = 0, **more) -> None:
        self.book.stands(server, Standing(low, **more))


# ---- courses -----------------------------------------------------------------------------------------------------


def test_a_short_last_batch_is_cut_into_fewer_slices_and_ends_the_epoch():
    one = course(num_rows=10, slices=4, batch_size=8)
    assert [one.rows(step) for step in (1, 2, 3)] == [8, 2, 8]
    assert [one.items(step) for step in (1, 2, 3)] == [4, 1, 4]
    assert [one.ends_epoch(step) for step in (1, 2, 3)] == [False, True, False]
    assert [one.next_end(step) for step in (1, 2, 3, 6)] == [2, 2, 4, 6]


def test_a_step_that_one_worker_computes_is_handed_out_whole():
    assert course(whole=True).items(1) == 1
    assert course(whole=True).places(1) == 2


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 39), st.integers(1, 9))
def test_a_course_takes_every_row_of_every_epoch_once_wherever_it_begins(num_rows, batch_size, start_row, first):
    start_row %= num_rows
    one = course(
        num_rows=num_rows, batch_size=batch_size, start_row=start_row, first=first, last=first + 99, slices=batch_size
    )
    expected = start_row
    for step in range(first, first + 100):
        assert one.start(step) == expected
        assert 0 < one.rows(step) <= batch_size
        expected += one.rows(step)
        assert one.ends_epoch(step) == (expected == num_rows)
        end = one.next_end(step)
        assert end == one.last or (one.ends_epoch(end) and not any(one.ends_epoch(t) for t in range(step, end)))
        expected %= num_rows


# ---- leases ------------------------------------------------------------------------------------------------------


def test_slices_are_handed_out_in_order_each_with_a_row_and_a_filling_of_its_own():
    talk = Talk()
    one, other = talk.work(1), talk.work(2)
    assert [one.item, other.item] == [Item(1, 0), Item(1, 1)]
    assert one.row != other.row
    assert one.filling != other.filling
    assert talk.ask(3) is None, "the next step waits for this one"


@pytest.mark.parametrize(("rule", "steps"), [(SYNC, [1]), (SSP, [1, 2]), (Rule(ahead=2), [1, 2, 3])])
def test_nobody_computes_further_ahead_than_the_rule_says(rule, steps):
    talk = Talk(rule, slices=1, num_rows=40)
    held = [talk.ask(worker) for worker in range(1, 9)]
    assert [one.held.step for one in held if isinstance(one, Grant)] == steps
    talk.apply(1)
    assert talk.work(9).step == steps[-1] + 1


def test_a_server_that_lags_holds_everybody_back_to_its_version():
    talk = Talk(servers=2, slices=1)
    held = talk.fill(1)
    talk.apply(1, server=0)
    assert talk.ask(1, held) is None
    talk.apply(1, server=1)
    assert talk.ask(1) == Grant(Held(2, 0, 0, held.filling + 1), version=1)


def test_in_async_what_servers_must_remember_is_bounded(monkeypatch):
    monkeypatch.setattr(leases, "WINDOW", 64)
    talk = Talk(ASYNC, last=100, num_rows=400, rows=3)
    slow, seen = talk.work(1), set()
    for _ in range(63):
        held = talk.fill(2)
        seen.add(held.step)
        talk.book.stands(0, Standing(0, frozenset({held.step})))
    assert max(seen) == 64
    assert talk.ask(2) is None, "step 1 is still missing"
    talk.book.filled(slow)
    talk.apply(64)
    assert talk.work(2).step == 65


def test_an_answer_that_was_lost_is_given_again():
    talk = Talk()
    assert talk.work(1) == talk.work(1)


def test_what_a_worker_says_that_it_holds_is_not_granted_to_it_again():
    talk = Talk()
    held = talk.work(1)
    assert talk.ask(1, held) is None, "word of the filling may be on its way"


def test_there_is_no_work_without_a_free_row():
    talk = Talk(SSP, rows=2)
    first, second = talk.fill(1), talk.fill(2)
    assert talk.ask(3) is None
    talk.apply(1)
    assert {talk.work(1).row, talk.work(2).row} == {first.row, second.row}


def test_a_filling_that_is_not_leased_is_not_wanted():
    talk = Talk()
    held = talk.fill(1)
    assert talk.book.filled(held), "said twice"
    assert not talk.book.filled(Held(1, 1, 5, 99))
    talk.apply(1)
    assert not talk.book.filled(held)


def test_an_ask_that_comes_late_says_nothing():
    talk = Talk()
    held = talk.work(1)
    book = talk.book
    assert book.ask(1, book.number, 0, 0, 0, ()) is None
    assert book.ask(1, book.number + 1, 99, 0, 0, ()) is None, "it was meant for another book"
    assert talk.work(1) == held


# ---- the dead ----------------------------------------------------------------------------------------------------


def test_what_a_dead_worker_had_is_handed_out_first():
    talk = Talk()
    lost = talk.work(1)
    talk.work(2)
    talk.book.lose([2, 3])
    again = talk.work(3)
    assert again.item == lost.item
    assert again.filling > lost.filling


def test_whoever_leaves_has_what_it_had_given_to_others_and_no_new_book_waits_for_it():
    talk = Talk()
    held = talk.work(1)
    assert talk.work(2).place == 1
    talk.book.lose([1, 2])
    talk.book.leave(1)
    assert talk.ask(1) is None, "it is not answered any more"
    assert talk.book.filled(held) is False
    talk.book.lose([1, 2])  # it still lives
    again = Talk(minutes=talk.book.minutes)
    again.book.lose([1, 2])
    again.book.expect([1, 2])
    assert again.fill(2).item == held.item


def test_the_dead_are_not_answered():
    talk = Talk()
    talk.book.lose([2])
    assert talk.ask(1) is None


def test_a_dead_workers_gradient_counts_if_every_server_has_it():
    talk = Talk(servers=2)
    held = talk.fill(1)
    for server in (0, 1):
        talk.apply(0, server=server, has=frozenset({held.item}))
    talk.book.lose([2])
    assert talk.work(2).item == Item(1, 1)
    assert talk.book.rows_used == 2, "its row is still read"


def test_a_dead_workers_gradient_is_redone_when_a_server_loses_it():
    talk = Talk(servers=2)
    held = talk.fill(1)
    for server in (0, 1):
        talk.apply(0, server=server, has=frozenset({held.item}))
    talk.book.lose([2])
    talk.apply(0, server=1)
    assert talk.work(2).item == held.item


def test_word_of_a_server_that_comes_late_undoes_nothing():
    talk = Talk(slices=1)
    talk.fill(1)
    talk.apply(1)
    talk.apply(0)
    assert talk.book.low == 1
    assert talk.work(1).step == 2


def test_steps_that_were_applied_out_of_order_stay_so_when_word_comes_late():
    talk = Talk(ASYNC)
    talk.work(1)
    held = talk.fill(2)
    talk.apply(0, seen=frozenset({2}))
    talk.apply(0)
    talk.ask(2, held)
    assert not talk.book.filled(held)


def test_a_row_is_not_given_away_while_somebody_may_be_writing_there():
    talk = Talk(rows=2, slices=1)
    talk.work(1)
    talk.book.lose([2, 3])
    slow = talk.work(2)
    talk.apply(1)  # the gradient of the dead has turned up
    assert talk.work(3).row != slow.row
    talk.apply(2)
    assert talk.work(3).row != slow.row, "worker 2 has not been heard of"
    talk.ask(2, slow)
    assert talk.book.rows_used == 2
    talk.ask(2)
    assert talk.book.rows_used == 1


def test_rows_come_back_from_workers_that_learn_late_that_theirs_were_applied():
    talk = Talk(slices=1)
    held = talk.fill(1)
    talk.apply(1)
    later = talk.work(1, held)
    talk.book.filled(later)
    talk.apply(2)
    talk.ask(1)
    assert talk.book.rows_used == 1


# ---- a book after another ----------------------------------------------------------------------------------------


def after(before: Talk, *workers: int, low: int = 0, rule: Rule = SYNC) -> Talk:
    talk = Talk(rule, minutes=before.book.minutes)
    talk.book = Book(talk.course, rule, [Standing(low)], num_rows=6, number=2, minutes=before.book.minutes)
    talk.book.expect(workers)
    return talk


def test_a_new_book_hands_out_nothing_before_all_have_said_what_they_hold():
    before = Talk()
    held = before.work(1)
    talk = after(before, 1, 2)
    assert talk.ask(2) is None
    talk.ask(1, held)
    assert talk.work(2).item == Item(1, 1)
    assert talk.book.filled(held), "the lease goes on"


def test_a_new_book_does_not_wait_for_the_dead():
    talk = after(Talk(), 1, 2)
    talk.book.lose([2])
    assert talk.work(2).item == Item(1, 0)


def test_a_new_books_fillings_are_its_own():
    before = Talk()
    old = {before.work(worker).filling for worker in (1, 2)}
    talk = after(before)
    assert not old & {talk.work(worker).filling for worker in (1, 2)}


def test_a_new_book_goes_on_with_the_meeting_that_was_called():
    before = Talk(last=3)
    before.apply(3)
    assert before.ask(1, wish=4) == Meet(3, 4)
    talk = after(before, 1, 2, low=2)  # an old word of its server
    assert talk.ask(2) == Meet(3, 4), "worker 1 waits there, and does not ask"


def test_a_new_book_does_not_end_a_meeting_before_it_has_heard_of_all():
    before = Talk()
    before.apply(3)
    before.ask(1)
    talk = after(before, 1, 2, low=3)
    assert talk.ask(1, met=3) is None
    assert talk.ask(2) == Meet(3, 0)


def test_a_new_book_calls_no_meeting_before_steps_that_may_still_turn_up():
    before = Talk(SSP, slices=1)
    before.fill(1)
    before.fill(1)  # steps 1 and 2, whose worker dies now, and word of which may be on its way
    talk = after(before, rule=SSP)
    talk.ask(2, wish=1)
    talk.apply(1)
    assert not isinstance(talk.ask(2), Meet)
    talk.apply(2)
    assert talk.ask(2) == Meet(2, 1)


# ---- meetings ----------------------------------------------------------------------------------------------------


def test_all_meet_after_an_epoch_and_go_on_when_all_are_back():
    talk = Talk()  # 3 steps each
    talk.ask(2)
    talk.apply(3)
    assert talk.ask(1) == Meet(3, 0)
    assert talk.ask(2) == Meet(3, 0)
    assert talk.ask(1, met=3) is None
    assert talk.ask(2, met=3).held.step == 4


def test_nobody_meets_while_something_is_handed_out():
    talk = Talk()
    talk.apply(2)
    held = talk.fill(1), talk.fill(2)
    assert talk.ask(3) is None
    talk.apply(3)
    assert talk.ask(3) == Meet(3, 0)
    assert held


def test_whoever_wishes_meets_all_after_what_is_handed_out():
    talk = Talk(slices=1)
    talk.fill(1)
    assert talk.ask(2, wish=2) is None
    assert talk.ask(3, wish=1) is None
    talk.apply(1)
    assert [talk.ask(worker) for worker in (1, 2, 3)] == [Meet(1, 2)] * 3


def test_the_reason_does_not_change_once_a_meeting_is_called():
    talk = Talk()
    talk.apply(3)
    assert talk.ask(1, wish=1) == Meet(3, 1)
    assert talk.ask(2, wish=5) == Meet(3, 1)


def test_a_wish_right_after_a_meeting_is_for_one_step_later():
    talk = Talk(slices=1)
    talk.apply(3)
    assert talk.ask(1) == Meet(3, 0)
    held = talk.ask(1, met=3, wish=1).held
    talk.book.filled(held)
    talk.apply(4)
    assert talk.ask(1, met=3) == Meet(4, 1)


def test_whoever_missed_a_meeting_waits_for_the_next_while_others_work():
    talk = Talk(slices=1)
    talk.apply(3)
    talk.ask(1)
    assert talk.work(1, met=3).step == 4
    assert talk.ask(2) is None
    talk.book.lose([2])
    assert talk.work(2).step == 4, "nobody else is there"


def test_after_the_last_step_there_is_nothing_but_the_last_meeting():
    talk = Talk()
    talk.apply(3)
    talk.ask(1)
    talk.ask(1, met=3)
    talk.apply(6)
    assert talk.ask(1, met=3) == Meet(6, 0)
    assert talk.ask(1, met=6) is None
    assert talk.ask(2) == Meet(6, 0), "a newcomer"


# ---- backups -----------------------------------------------------------------------------------------------------


def test_a_slow_slice_is_handed_out_twice_and_the_first_filling_wins():
    talk = Talk(Rule(ahead=0, backups=1))
    slow, other = talk.work(1), talk.fill(2)
    backup = talk.work(2, other)
    assert backup.item == slow.item
    assert talk.ask(3) is None, "one backup is all there is"
    assert talk.book.filled(backup)
    assert not talk.book.filled(slow)
    assert talk.book.rows_used == 3, "the slow one may still be writing"
    talk.apply(1)
    talk.ask(1)
    assert talk.ask(2).held.step == 2


def test_whoever_was_late_is_not_leased_the_slice_again_by_saying_that_it_holds_it():
    talk = Talk(Rule(ahead=0, backups=1))
    slow, other = talk.work(1), talk.fill(2)
    talk.book.filled(talk.work(2, other))
    assert talk.ask(1, slow) is None
    assert not talk.book.filled(slow)


def test_whoever_was_late_is_wanted_after_all_when_the_first_to_fill_dies():
    talk = Talk(Rule(ahead=0, backups=1))
    slow, other = talk.work(1), talk.fill(2)
    talk.book.filled(talk.work(3))
    talk.book.lose([1, 2])
    assert talk.ask(1, slow) is None
    assert talk.book.filled(slow)
    assert talk.ask(2, other) is None, "and nobody else is given it"


def test_a_backup_goes_on_when_the_first_dies():
    talk = Talk(Rule(ahead=0, backups=1))
    slow, other = talk.work(1), talk.fill(2)
    backup = talk.work(3)
    assert backup.item == slow.item
    talk.book.lose([2, 3])
    assert talk.book.filled(backup)
    assert talk.ask(2, other) is None, "nothing is left to do before the step is applied"


def test_without_backups_nothing_is_handed_out_twice():
    talk = Talk()
    talk.work(1), talk.work(2)
    assert talk.ask(3) is None


# ---- what workers expect -----------------------------------------------------------------------------------------


def test_a_worker_is_given_what_it_was_told_to_expect_and_others_something_else():
    talk = Talk(ASYNC)
    assert talk.work(1).step == 1
    assert talk.book.soon(1, 1) == [(2, 0)]
    assert talk.fill(2).step == 3
    talk.apply(0, seen=frozenset([1, 3]))
    assert talk.work(1).item == (2, 0)
    assert talk.book.soon(1, 1) == [], "the epoch ends with step 3"


def test_what_one_expects_is_given_to_others_before_they_idle():
    talk = Talk()
    first = talk.work(1)
    assert talk.book.soon(1, 2) == [(1, 1), (2, 0)]
    assert talk.work(2).item == (1, 1), "nothing else is admitted before step 1 is applied"
    talk.book.filled(first)
    assert talk.ask(1, first) is None
    assert talk.book.soon(1, 2) == [(2, 0), (2, 1)]


def test_what_the_dead_expected_comes_first():
    talk = Talk(ASYNC)
    talk.work(1)
    assert talk.book.soon(1, 1) == [(2, 0)]
    talk.book.lose([2])
    assert [talk.fill(2).step for _ in range(3)] == [1, 2, 3]


def test_what_is_expected_does_not_put_off_a_meeting():
    talk = Talk(ASYNC)
    talk.fill(1)
    assert talk.book.soon(1, 2) == [(2, 0), (3, 0)]
    assert talk.ask(2, wish=1) is None, "step 1 is handed out, and what is expected is not"
    talk.apply(1)
    assert talk.ask(1) == talk.ask(2) == Meet(1, 1)


# ---- any order of events -----------------------------------------------------------------------------------------


class AnyOrder(RuleBasedStateMachine):
    """Workers that ask, fill, hold and die; one server that applies what is there, in order."""

    @initialize(
        ahead=st.sampled_from([0, 1, 2]),
        backups=st.integers(0, 2),
        slices=st.integers(1, 3),
        soon=st.sampled_from([0, 1, 3]),
    )
    def begin(self, ahead: int, backups: int, slices: int, soon: int) -> None:
        self.soon = soon
        self.rule = Rule(ahead=ahead, backups=backups)
        self.course = course(last=9, slices=slices, batch_size=2 * slices, num_rows=7 * slices)
        self.low, self.number = 0, 1
        self.book = self._new_book(Minutes.before(1))
        self.holding: dict[int, list[Held]] = {worker: [] for worker in range(3)}
        self.writing: dict[int, Held] = {}
        self.met = dict.fromkeys(range(3), 0)
        self.filled: set[Item] = set()
        self.tickets = 0

    def _new_book(self, minutes: Minutes) -> Book:
        standings = [Standing(self.low)]
        return Book(self.course, self.rule, standings, num_rows=5, number=self.number, minutes=minutes)

    @rule(data=st.data(), wish=st.sampled_from([0, 0, 0, 1]))
    def ask(self, data: st.DataObject, wish: int) -> None:
        worker = data.draw(st.sampled_from(sorted(self.holding)))
        self.tickets += 1
        holding = self.holding[worker] = [held for held in self.holding[worker] if held.step > self.low]
        if worker in self.writing and self.writing[worker] not in holding:
            holding.append(self.writing[worker])
        answer = self.book.ask(worker, self.number, self.tickets, self.met[worker], wish, tuple(holding))
        if isinstance(answer, Grant):
            assert answer.held not in holding
            assert answer.version >= answer.held.step - 1 - self.rule.ahead
            assert answer.held.row not in {held.row for held in self.writing.values()}, "two would write to one row"
            self.writing[worker] = answer.held
            holding.append(answer.held)
            self.look_ahead(worker)
        if isinstance(answer, Meet):
            assert answer.step == self.low
            assert not any(held.step > self.low for held in self.writing.values())
            self.met[worker] = answer.step

    def look_ahead(self, worker: int) -> None:
        expected = self.book.soon(worker, self.soon)
        assert len(expected) <= self.soon
        assert all(item.step <= self.course.last for item in expected)
        others = [item for other in self.holding if other != worker for item in self.book.soon(other, 0)]
        assert not {*expected} & {*others, *(held.item for held in self.writing.values())}

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.writing)))
        held = self.writing.pop(worker)
        self.book.filled(held)
        self.filled.add(held.item)

    @rule()
    def apply(self) -> None:
        step = self.low + 1
        if step <= self.course.last and all((step, place) in self.filled for place in range(self.course.items(step))):
            self.low = step
        self.book.stands(0, Standing(self.low, has=frozenset(item for item in self.filled if item.step > self.low)))

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.holding)))
        self.writing.pop(worker, None)
        del self.holding[worker], self.met[worker]
        newcomer = worker + 10
        self.holding[newcomer], self.met[newcomer] = [], 0
        self.book.lose(list(self.holding))

    @rule()
    def lose_book(self) -> None:
        self.number += 1
        self.book = self._new_book(self.book.minutes)
        self.book.lose(list(self.holding))
        self.book.expect(self.holding)
        self.filled = {item for item in self.filled if item.step <= self.low}

    @invariant()
    def rows_are_bounded(self) -> None:
        assert self.book.rows_used <= 5

    def teardown(self) -> None:
        """Left alone, everybody ends with the course."""
        for _ in range(400):
            for worker in list(self.holding):
                self._one_round(worker)
            self.apply()
            if set(self.met.values()) == {self.course.last}:
                break
        assert self.low == self.course.last
        assert set(self.met.values()) == {self.course.last}

    def _one_round(self, worker: int) -> None:
        if worker in self.writing:
            held = self.writing.pop(worker)
            self.filled.add(held.item)
        self.tickets += 1
        holding = self.holding[worker] = [held for held in self.holding[worker] if held.step > self.low]
        for held in holding:
            self.book.filled(held)
            self.filled.add(held.item)
        answer = self.book.ask(worker, self.number, self.tickets, self.met[worker], 0, tuple(holding))
        if isinstance(answer, Grant):
            self.writing[worker] = answer.held
            holding.append(answer.held)
        if isinstance(answer, Meet):
            self.met[worker] = answer.step


AnyOrder.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestAnyOrderOfEvents = AnyOrder.TestCase
