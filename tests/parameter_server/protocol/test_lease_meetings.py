"""When all workers meet, and what a book of leases finds that comes after another."""

from __future__ import annotations

from manyhands.parameter_server.protocol.leases import Item, SyncPoint
from tests.parameter_server.protocol.lease_talks import SSP, Talk, after


def test_all_meet_after_an_epoch_and_go_on_when_all_are_back():
    talk = Talk()  # 3 steps each
    talk.ask(2)
    talk.apply(3)
    assert talk.ask(1) == SyncPoint(3, 0)
    assert talk.ask(2) == SyncPoint(3, 0)
    assert talk.ask(1, met=3) is None
    assert talk.ask(2, met=3).held.step == 4


def test_nobody_meets_while_something_is_handed_out():
    talk = Talk()
    talk.apply(2)
    held = talk.fill(1), talk.fill(2)
    assert talk.ask(3) is None
    talk.apply(3)
    assert talk.ask(3) == SyncPoint(3, 0)
    assert held


def test_whoever_wishes_meets_all_after_what_is_handed_out():
    talk = Talk(slices=1)
    talk.fill(1)
    assert talk.ask(2, wish=2) is None
    assert talk.ask(3, wish=1) is None
    talk.apply(1)
    assert [talk.ask(worker) for worker in (1, 2, 3)] == [SyncPoint(1, 2)] * 3


def test_the_reason_does_not_change_once_a_meeting_is_called():
    talk = Talk()
    talk.apply(3)
    assert talk.ask(1, wish=1) == SyncPoint(3, 1)
    assert talk.ask(2, wish=5) == SyncPoint(3, 1)


def test_a_wish_right_after_a_meeting_is_for_one_step_later():
    talk = Talk(slices=1)
    talk.apply(3)
    assert talk.ask(1) == SyncPoint(3, 0)
    held = talk.ask(1, met=3, wish=1).held
    talk.book.filled(held)
    talk.apply(4)
    assert talk.ask(1, met=3) == SyncPoint(4, 1)


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
    assert talk.ask(1, met=3) == SyncPoint(6, 0)
    assert talk.ask(1, met=6) is None
    assert talk.ask(2) == SyncPoint(6, 0), "a newcomer"


# ---- a book after another ------------------------------------------------------------------------------------------


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
    assert before.ask(1, wish=4) == SyncPoint(3, 4)
    talk = after(before, 1, 2, low=2)  # an old word of its server
    assert talk.ask(2) == SyncPoint(3, 4), "worker 1 waits there, and does not ask"


def test_a_new_book_does_not_end_a_meeting_before_it_has_heard_of_all():
    before = Talk()
    before.apply(3)
    before.ask(1)
    talk = after(before, 1, 2, low=3)
    assert talk.ask(1, met=3) is None
    assert talk.ask(2) == SyncPoint(3, 0)


def test_a_new_book_calls_no_meeting_before_steps_that_may_still_turn_up():
    before = Talk(SSP, slices=1)
    before.fill(1)
    before.fill(1)  # steps 1 and 2, whose worker dies now, and word of which may be on its way
    talk = after(before, rule=SSP)
    talk.ask(2, wish=1)
    talk.apply(1)
    assert not isinstance(talk.ask(2), SyncPoint)
    talk.apply(2)
    assert talk.ask(2) == SyncPoint(2, 1)
