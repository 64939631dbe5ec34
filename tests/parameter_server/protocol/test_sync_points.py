"""When all workers synchronise, and how a new lease table continues after the one before it was lost."""

from __future__ import annotations

from manyhands.parameter_server.protocol.leases import Item, SyncPoint
from tests.parameter_server.protocol.lease_clients import SSP, LeaseClients, after


def test_all_workers_synchronise_after_an_epoch_and_work_again_when_all_are_back():
    clients = LeaseClients()  # 3 steps each
    clients.ask(2)
    clients.apply(3)
    assert clients.ask(1) == SyncPoint(3, 0)
    assert clients.ask(2) == SyncPoint(3, 0)
    assert clients.ask(1, met=3) is None
    assert clients.ask(2, met=3).held.step == 4


def test_no_worker_synchronises_while_a_lease_is_out():
    clients = LeaseClients()
    clients.apply(2)
    held = clients.fill(1), clients.fill(2)
    assert clients.ask(3) is None
    clients.apply(3)
    assert clients.ask(3) == SyncPoint(3, 0)
    assert held


def test_a_request_for_a_sync_point_is_granted_after_the_leases_that_are_out():
    clients = LeaseClients(slices=1)
    clients.fill(1)
    assert clients.ask(2, request=2) is None
    assert clients.ask(3, request=1) is None
    clients.apply(1)
    assert [clients.ask(worker) for worker in (1, 2, 3)] == [SyncPoint(1, 2)] * 3


def test_the_reason_of_a_sync_point_does_not_change():
    clients = LeaseClients()
    clients.apply(3)
    assert clients.ask(1, request=1) == SyncPoint(3, 1)
    assert clients.ask(2, request=5) == SyncPoint(3, 1)


def test_a_request_right_after_a_sync_point_is_for_one_step_later():
    clients = LeaseClients(slices=1)
    clients.apply(3)
    assert clients.ask(1) == SyncPoint(3, 0)
    held = clients.ask(1, met=3, request=1).held
    clients.table.filled(held)
    clients.apply(4)
    assert clients.ask(1, met=3) == SyncPoint(4, 1)


def test_a_worker_that_missed_a_sync_point_waits_for_the_next_while_others_work():
    clients = LeaseClients(slices=1)
    clients.apply(3)
    clients.ask(1)
    assert clients.work(1, met=3).step == 4
    assert clients.ask(2) is None
    clients.table.lose([2])
    assert clients.work(2).step == 4, "no other worker is left"


def test_after_the_last_step_there_is_nothing_but_the_last_sync_point():
    clients = LeaseClients()
    clients.apply(3)
    clients.ask(1)
    clients.ask(1, met=3)
    clients.apply(6)
    assert clients.ask(1, met=3) == SyncPoint(6, 0)
    assert clients.ask(1, met=6) is None
    assert clients.ask(2) == SyncPoint(6, 0), "a newcomer"


# ---- a lease table after another -----------------------------------------------------------------------------------


def test_a_new_lease_table_grants_nothing_before_all_workers_have_reported_their_leases():
    before = LeaseClients()
    held = before.work(1)
    clients = after(before, 1, 2)
    assert clients.ask(2) is None
    clients.ask(1, held)
    assert clients.work(2).item == Item(1, 1)
    assert clients.table.filled(held), "the lease is still valid"


def test_a_new_lease_table_does_not_wait_for_the_dead():
    clients = after(LeaseClients(), 1, 2)
    clients.table.lose([2])
    assert clients.work(2).item == Item(1, 0)


def test_a_new_lease_table_uses_new_fillings():
    before = LeaseClients()
    old = {before.work(worker).filling for worker in (1, 2)}
    clients = after(before)
    assert not old & {clients.work(worker).filling for worker in (1, 2)}


def test_a_new_lease_table_keeps_the_sync_point_that_was_called():
    before = LeaseClients(last=3)
    before.apply(3)
    assert before.ask(1, request=4) == SyncPoint(3, 4)
    clients = after(before, 1, 2, low=2)  # an old report of its server
    assert clients.ask(2) == SyncPoint(3, 4), "worker 1 waits there, and does not ask"


def test_a_new_lease_table_does_not_end_a_sync_point_before_all_workers_have_reported():
    before = LeaseClients()
    before.apply(3)
    before.ask(1)
    clients = after(before, 1, 2, low=3)
    assert clients.ask(1, met=3) is None
    assert clients.ask(2) == SyncPoint(3, 0)


def test_a_new_lease_table_calls_no_sync_point_before_steps_that_may_still_turn_up():
    before = LeaseClients(SSP, slices=1)
    before.fill(1)
    before.fill(1)  # steps 1 and 2, whose worker dies now, and whose report may be on its way
    clients = after(before, rule=SSP)
    clients.ask(2, request=1)
    clients.apply(1)
    assert not isinstance(clients.ask(2), SyncPoint)
    clients.apply(2)
    assert clients.ask(2) == SyncPoint(2, 1)
