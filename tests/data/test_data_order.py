"""The order of rows and the cut into slices: pure arithmetic."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.data.evaluation import eval_slices
from manyhands.data.sample_order import SliceDivision, num_slices, order, slice_bounds, slice_key, slices_of

sizes = st.integers(1, 700)
seeds = st.integers(-(2**70), 2**70)


@settings(max_examples=60, deadline=None)
@given(sizes, seeds, st.integers(0, 10**6))
def test_an_epoch_is_a_permutation_of_its_rows(num_rows, seed, epoch):
    assert sorted(order(num_rows, seed, epoch, 0, num_rows)) == list(range(num_rows))


@settings(max_examples=60, deadline=None)
@given(st.data(), sizes, seeds)
def test_any_part_of_the_order_can_be_read_alone(data, num_rows, seed):
    start = data.draw(st.integers(0, num_rows))
    stop = data.draw(st.integers(start, num_rows))
    whole = order(num_rows, seed, 2, 0, num_rows)
    np.testing.assert_array_equal(order(num_rows, seed, 2, start, stop), whole[start:stop])


def test_the_order_is_the_same_for_ever():
    # Changing these numbers breaks the promise to every run that is to be resumed.
    assert order(10, 0, 0, 0, 10).tolist() == [9, 0, 6, 3, 1, 8, 7, 5, 2, 4]
    assert order(10**12, 7, 3, 5, 9).tolist() == [777148470803, 353878560397, 848719682184, 827665433877]


def test_every_seed_and_epoch_gives_another_order():
    orders = {tuple(order(100, seed, epoch, 0, 100)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_small_epochs_take_every_order_about_equally_often():
    counts = np.zeros(24)
    index = {}
    for seed in range(2400):
        counts[index.setdefault(tuple(order(4, seed, 0, 0, 4)), len(index))] += 1
    assert (((counts - 100) ** 2) / 100).sum() < 50  # chi-squared, 23 degrees of freedom: p < 0.001 beyond


def test_without_shuffling_rows_come_as_they_are():
    assert order(10, 0, 3, 2, 6, shuffle=False).tolist() == [2, 3, 4, 5]


def test_a_position_in_a_huge_epoch_costs_only_what_is_read():
    rows = order(2**40, 1, 0, 2**39, 2**39 + 1000)
    assert len(set(rows.tolist())) == 1000
    assert rows.max() < 2**40


@given(st.integers(1, 500), st.integers(1, 64))
def test_slices_partition_the_rows(rows, count):
    bounds = slice_bounds(rows, count)
    assert [row for low, high in bounds for row in range(low, high)] == list(range(rows))
    lengths = [high - low for low, high in bounds]
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(1, 40), st.integers(1, 64))
def test_workers_partition_the_slices(world_size, count):
    shares = [slices_of(rank, world_size, count) for rank in range(world_size)]
    assert [v for share in shares for v in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(len(share) == 0 for share in shares[count:])


@pytest.mark.parametrize(("world_size", "count"), [(1, 8), (2, 8), (3, 12), (4, 8), (5, 20), (8, 8)])
def test_a_share_is_one_block_of_the_tree_where_that_is_possible(world_size, count):
    for rank in range(world_size):
        share = slices_of(rank, world_size, count)
        assert share.start % len(share) == 0


def test_a_short_batch_never_leaves_a_slice_with_one_row_if_it_can_have_two():
    assert num_slices(8, 8, short=False) == 8
    assert num_slices(15, 8, short=True) == 7
    assert num_slices(16, 8, short=True) == 8
    assert num_slices(3, 8, short=True) == 1
    assert num_slices(1, 8, short=True) == 1


def test_keys_differ_between_seeds_steps_slices_and_streams():
    keys = {
        slice_key(seed, step, v, stream)
        for seed in range(4)
        for step in range(4)
        for v in range(4)
        for stream in ("compute", "fetch", "evaluate")
    }
    assert len(keys) == 192
    assert all(0 <= key < 2**63 for key in keys)


@given(st.integers(1, 300), st.integers(1, 50), st.integers(1, 9))
def test_evaluation_takes_every_row_once_and_cuts_alike_for_any_number_of_workers(rows, batch_size, world_size):
    dealt = [piece for rank in range(world_size) for piece in eval_slices(rows, batch_size, world_size, rank)]
    assert dealt == eval_slices(rows, batch_size, 1, 0)
    assert [row for piece in dealt for row in range(piece.start, piece.stop)] == list(range(rows))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any))
def test_a_division_gives_each_rank_its_number_of_slices_in_order(parts):
    shares = SliceDivision(len(parts), tuple(parts)).shares(sum(parts))
    assert [len(share) for share in shares] == parts
    assert [v for share in shares for v in share] == list(range(sum(parts)))


@given(st.integers(1, 8), st.integers(1, 40))
def test_a_division_without_parts_or_of_a_short_batch_is_even(world_size, count):
    even = tuple(slices_of(rank, world_size, count) for rank in range(world_size))
    assert SliceDivision(world_size).shares(count) == even
    assert SliceDivision(world_size, (count + 1,) + (0,) * (world_size - 1)).shares(count) == even
    assert tuple(SliceDivision(world_size).share(rank, count) for rank in range(world_size)) == even
