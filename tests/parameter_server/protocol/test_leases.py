"""Who computes what under parameter servers, in any order in which workers ask and die: decisions over plain values."""

from __future__ import annotations

import pytest

from manyhands.parameter_server.protocol import leases
from manyhands.parameter_server.protocol.leases import Item, Lease, LeaseGrant, Rule, ServerProgress, SyncPoint
from tests.parameter_server.protocol.lease_clients import ASYNC, SSP, SYNC, LeaseClients


def test_slices_are_leased_in_order_each_with_its_own_row_and_filling():
    clients = LeaseClients()
    one, other = clients.work(1), clients.work(2)
    assert [one.item, other.item] == [Item(1, 0), Item(1, 1)]
    assert one.row != other.row
    assert one.filling != other.filling
    assert clients.ask(3) is None, "the next step waits for this one"


@pytest.mark.parametrize(("rule", "steps"), [(SYNC, [1]), (SSP, [1, 2]), (Rule(ahead=2), [1, 2, 3])])
def test_no_worker_computes_further_ahead_than_the_rule_says(rule, steps):
    clients = LeaseClients(rule, slices=1, num_rows=40)
    held = [clients.ask(worker) for worker in range(1, 9)]
    assert [one.held.step for one in held if isinstance(one, LeaseGrant)] == steps
    clients.apply(1)
    assert clients.work(9).step == steps[-1] + 1


def test_a_server_that_lags_holds_all_workers_back_to_its_version():
    clients = LeaseClients(servers=2, slices=1)
    held = clients.fill(1)
    clients.apply(1, server=0)
    assert clients.ask(1, held) is None
    clients.apply(1, server=1)
    assert clients.ask(1) == LeaseGrant(Lease(2, 0, 0, held.filling + 1), version=1)


def test_in_async_what_servers_must_remember_is_bounded(monkeypatch):
    monkeypatch.setattr(leases, "WINDOW", 64)
    clients = LeaseClients(ASYNC, last=100, num_rows=400, rows=3)
    slow, seen = clients.work(1), set()
    for _ in range(63):
        held = clients.fill(2)
        seen.add(held.step)
        clients.table.stands(0, ServerProgress(0, frozenset({held.step})))
    assert max(seen) == 64
    assert clients.ask(2) is None, "step 1 is still missing"
    clients.table.filled(slow)
    clients.apply(64)
    assert clients.work(2).step == 65


def test_an_answer_that_was_lost_is_given_again():
    clients = LeaseClients()
    assert clients.work(1) == clients.work(1)


def test_what_a_worker_says_that_it_holds_is_not_granted_to_it_again():
    clients = LeaseClients()
    held = clients.work(1)
    assert clients.ask(1, held) is None, "word of the filling may be on its way"


def test_there_is_no_work_without_a_free_row():
    clients = LeaseClients(SSP, rows=2)
    first, second = clients.fill(1), clients.fill(2)
    assert clients.ask(3) is None
    clients.apply(1)
    assert {clients.work(1).row, clients.work(2).row} == {first.row, second.row}


def test_a_filling_that_is_not_leased_is_not_wanted():
    clients = LeaseClients()
    held = clients.fill(1)
    assert clients.table.filled(held), "said twice"
    assert not clients.table.filled(Lease(1, 1, 5, 99))
    clients.apply(1)
    assert not clients.table.filled(held)


def test_an_ask_that_comes_late_says_nothing():
    clients = LeaseClients()
    held = clients.work(1)
    table = clients.table
    assert table.ask(1, table.number, 0, 0, 0, ()) is None
    assert table.ask(1, table.number + 1, 99, 0, 0, ()) is None, "it was meant for another table"
    assert clients.work(1) == held


# ---- the dead ------------------------------------------------------------------------------------------------------


def test_what_a_dead_worker_had_is_handed_out_first():
    clients = LeaseClients()
    lost = clients.work(1)
    clients.work(2)
    clients.table.lose([2, 3])
    again = clients.work(3)
    assert again.item == lost.item
    assert again.filling > lost.filling


def test_the_leases_of_a_worker_that_leaves_go_to_others_and_no_new_table_waits_for_it():
    clients = LeaseClients()
    held = clients.work(1)
    assert clients.work(2).place == 1
    clients.table.lose([1, 2])
    clients.table.leave(1)
    assert clients.ask(1) is None, "it is not answered any more"
    assert clients.table.filled(held) is False
    clients.table.lose([1, 2])  # it still lives
    again = LeaseClients(minutes=clients.table.minutes)
    again.table.lose([1, 2])
    again.table.expect([1, 2])
    assert again.fill(2).item == held.item


def test_the_dead_are_not_answered():
    clients = LeaseClients()
    clients.table.lose([2])
    assert clients.ask(1) is None


def test_a_dead_workers_gradient_counts_if_every_server_has_it():
    clients = LeaseClients(servers=2)
    held = clients.fill(1)
    for server in (0, 1):
        clients.apply(0, server=server, has=frozenset({held.item}))
    clients.table.lose([2])
    assert clients.work(2).item == Item(1, 1)
    assert clients.table.rows_used == 2, "its row is still read"


def test_a_dead_workers_gradient_is_redone_when_a_server_loses_it():
    clients = LeaseClients(servers=2)
    held = clients.fill(1)
    for server in (0, 1):
        clients.apply(0, server=server, has=frozenset({held.item}))
    clients.table.lose([2])
    clients.apply(0, server=1)
    assert clients.work(2).item == held.item


def test_word_of_a_server_that_comes_late_undoes_nothing():
    clients = LeaseClients(slices=1)
    clients.fill(1)
    clients.apply(1)
    clients.apply(0)
    assert clients.table.low == 1
    assert clients.work(1).step == 2


def test_steps_that_were_applied_out_of_order_stay_so_when_word_comes_late():
    clients = LeaseClients(ASYNC)
    clients.work(1)
    held = clients.fill(2)
    clients.apply(0, seen=frozenset({2}))
    clients.apply(0)
    clients.ask(2, held)
    assert not clients.table.filled(held)


def test_a_row_is_not_leased_again_while_its_worker_may_still_write_there():
    clients = LeaseClients(rows=2, slices=1)
    clients.work(1)
    clients.table.lose([2, 3])
    slow = clients.work(2)
    clients.apply(1)  # the gradient of the dead has turned up
    assert clients.work(3).row != slow.row
    clients.apply(2)
    assert clients.work(3).row != slow.row, "worker 2 has not reported"
    clients.ask(2, slow)
    assert clients.table.rows_used == 2
    clients.ask(2)
    assert clients.table.rows_used == 1


def test_rows_come_back_from_workers_that_learn_late_that_theirs_were_applied():
    clients = LeaseClients(slices=1)
    held = clients.fill(1)
    clients.apply(1)
    later = clients.work(1, held)
    clients.table.filled(later)
    clients.apply(2)
    clients.ask(1)
    assert clients.table.rows_used == 1


# ---- backups -------------------------------------------------------------------------------------------------------


def test_a_slow_slice_is_handed_out_twice_and_the_first_filling_wins():
    clients = LeaseClients(Rule(ahead=0, backups=1))
    slow, other = clients.work(1), clients.fill(2)
    backup = clients.work(2, other)
    assert backup.item == slow.item
    assert clients.ask(3) is None, "one backup is all there is"
    assert clients.table.filled(backup)
    assert not clients.table.filled(slow)
    assert clients.table.rows_used == 3, "the slow one may still be writing"
    clients.apply(1)
    clients.ask(1)
    assert clients.ask(2).held.step == 2


def test_a_worker_that_was_late_is_not_leased_the_slice_again_by_saying_that_it_holds_it():
    clients = LeaseClients(Rule(ahead=0, backups=1))
    slow, other = clients.work(1), clients.fill(2)
    clients.table.filled(clients.work(2, other))
    assert clients.ask(1, slow) is None
    assert not clients.table.filled(slow)


def test_a_worker_that_was_late_is_wanted_after_all_when_the_first_to_fill_dies():
    clients = LeaseClients(Rule(ahead=0, backups=1))
    slow, other = clients.work(1), clients.fill(2)
    clients.table.filled(clients.work(3))
    clients.table.lose([1, 2])
    assert clients.ask(1, slow) is None
    assert clients.table.filled(slow)
    assert clients.ask(2, other) is None, "and no other worker is leased it"


def test_a_backup_lease_continues_when_the_first_worker_dies():
    clients = LeaseClients(Rule(ahead=0, backups=1))
    slow, other = clients.work(1), clients.fill(2)
    backup = clients.work(3)
    assert backup.item == slow.item
    clients.table.lose([2, 3])
    assert clients.table.filled(backup)
    assert clients.ask(2, other) is None, "nothing is left to do before the step is applied"


def test_without_backups_nothing_is_handed_out_twice():
    clients = LeaseClients()
    clients.work(1), clients.work(2)
    assert clients.ask(3) is None


# ---- what workers expect -------------------------------------------------------------------------------------------


def test_a_worker_is_leased_what_it_was_promised_and_others_something_else():
    clients = LeaseClients(ASYNC)
    assert clients.work(1).step == 1
    assert clients.table.soon(1, 1) == [(2, 0)]
    assert clients.fill(2).step == 3
    clients.apply(0, seen=frozenset([1, 3]))
    assert clients.work(1).item == (2, 0)
    assert clients.table.soon(1, 1) == [], "the epoch ends with step 3"


def test_what_one_expects_is_given_to_others_before_they_idle():
    clients = LeaseClients()
    first = clients.work(1)
    assert clients.table.soon(1, 2) == [(1, 1), (2, 0)]
    assert clients.work(2).item == (1, 1), "nothing else is admitted before step 1 is applied"
    clients.table.filled(first)
    assert clients.ask(1, first) is None
    assert clients.table.soon(1, 2) == [(2, 0), (2, 1)]


def test_what_the_dead_expected_comes_first():
    clients = LeaseClients(ASYNC)
    clients.work(1)
    assert clients.table.soon(1, 1) == [(2, 0)]
    clients.table.lose([2])
    assert [clients.fill(2).step for _ in range(3)] == [1, 2, 3]


def test_promised_leases_do_not_put_off_a_sync_point():
    clients = LeaseClients(ASYNC)
    clients.fill(1)
    assert clients.table.soon(1, 2) == [(2, 0), (3, 0)]
    assert clients.ask(2, request=1) is None, "step 1 is leased, and what is expected is not"
    clients.apply(1)
    assert clients.ask(1) == clients.ask(2) == SyncPoint(1, 1)
