"""Which rows a step takes, and into how many slices it is cut: decisions over plain values."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.parameter_server.protocol.lease_clients import interval


def test_a_short_last_batch_is_cut_into_fewer_slices_and_ends_the_epoch():
    one = interval(num_rows=10, slices=4, batch_size=8)
    assert [one.rows(step) for step in (1, 2, 3)] == [8, 2, 8]
    assert [one.items(step) for step in (1, 2, 3)] == [4, 1, 4]
    assert [one.ends_epoch(step) for step in (1, 2, 3)] == [False, True, False]
    assert [one.next_end(step) for step in (1, 2, 3, 6)] == [2, 2, 4, 6]


def test_a_step_that_one_worker_computes_is_handed_out_whole():
    assert interval(whole=True).items(1) == 1
    assert interval(whole=True).places(1) == 2


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 39), st.integers(1, 9))
def test_an_interval_takes_every_row_of_every_epoch_once_wherever_it_begins(num_rows, batch_size, start_row, first):
    start_row %= num_rows
    one = interval(
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
