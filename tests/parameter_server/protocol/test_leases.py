"""Who computes what under parameter servers, in whatever order workers ask and die: decisions over plain values."""

from __future__ import annotations

import pytest

from manyhands.parameter_server.protocol import leases
from manyhands.parameter_server.protocol.leases import Item, Lease, LeaseGrant, Rule, ServerProgress, SyncPoint
from tests.parameter_server.protocol.lease_talks import ASYNC, SSP, SYNC, Talk


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
    assert [one.held.step for one in held if isinstance(one, LeaseGrant)] == steps
    talk.apply(1)
    assert talk.work(9).step == steps[-1] + 1


def test_a_server_that_lags_holds_everybody_back_to_its_version():
    talk = Talk(servers=2, slices=1)
    held = talk.fill(1)
    talk.apply(1, server=0)
    assert talk.ask(1, held) is None
    talk.apply(1, server=1)
    assert talk.ask(1) == LeaseGrant(Lease(2, 0, 0, held.filling + 1), version=1)


def test_in_async_what_servers_must_remember_is_bounded(monkeypatch):
    monkeypatch.setattr(leases, "WINDOW", 64)
    talk = Talk(ASYNC, last=100, num_rows=400, rows=3)
    slow, seen = talk.work(1), set()
    for _ in range(63):
        held = talk.fill(2)
        seen.add(held.step)
        talk.book.stands(0, ServerProgress(0, frozenset({held.step})))
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
    assert not talk.book.filled(Lease(1, 1, 5, 99))
    talk.apply(1)
    assert not talk.book.filled(held)


def test_an_ask_that_comes_late_says_nothing():
    talk = Talk()
    held = talk.work(1)
    book = talk.book
    assert book.ask(1, book.number, 0, 0, 0, ()) is None
    assert book.ask(1, book.number + 1, 99, 0, 0, ()) is None, "it was meant for another book"
    assert talk.work(1) == held


# ---- the dead ------------------------------------------------------------------------------------------------------


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


# ---- backups -------------------------------------------------------------------------------------------------------


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


# ---- what workers expect -------------------------------------------------------------------------------------------


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
    assert talk.ask(1) == talk.ask(2) == SyncPoint(1, 1)
