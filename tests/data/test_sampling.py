"""Rows by weight and batches by length: functions of (seed, epoch, position), on any worker."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

from manyhands.data.sources.as_source import as_source, split
from manyhands.errors import DataError
from manyhands.order import ByLength, Weighted
from tests.data.data_cases import Ledger, ThreadExchange, batches_of, pieces_by_slice, together

WEIGHTS = np.array([0.5, 3.0, 0.0, 1.0, 5.5])
LENGTHS = np.random.default_rng(0).integers(1, 200, 1003)


def chi_square(seen: np.ndarray, expected: np.ndarray) -> float:
    return float(((seen - expected) ** 2 / expected).sum())


def test_weighted_rows_are_drawn_by_the_law_of_torchs_sampler():
    draws = 200_000
    mine = np.bincount(Weighted(WEIGHTS, draws).rows(1, 0, 0, 0, draws), minlength=5)
    torchs = torch.tensor(list(WeightedRandomSampler(WEIGHTS.tolist(), draws))).bincount(minlength=5).numpy()
    expected = draws * WEIGHTS / WEIGHTS.sum()
    there = WEIGHTS > 0
    for seen in (mine, torchs):  # 3 degrees of freedom: above 21.1 once in 10,000 seeds, and the seed is fixed
        assert seen[2] == 0
        assert chi_square(seen[there], expected[there]) < 21.1


def test_without_replacement_each_draw_is_by_the_weights_that_are_left():
    epochs, order = 40_000, Weighted(WEIGHTS, 2, replacement=False)
    pairs = np.array([order.rows(1, 7, epoch, 0, 2) for epoch in range(epochs)])
    assert (pairs[:, 0] != pairs[:, 1]).all() and 2 not in pairs
    total, there = WEIGHTS.sum(), np.flatnonzero(WEIGHTS)
    law = {(a, b): WEIGHTS[a] / total * WEIGHTS[b] / (total - WEIGHTS[a]) for a in there for b in there if a != b}
    seen = np.array([((pairs == pair).all(1)).sum() for pair in law])
    assert chi_square(seen, epochs * np.array(list(law.values()))) < 37.4  # 11 degrees of freedom, once in 10,000


@pytest.mark.parametrize(
    "order", [Weighted(LENGTHS, 700), Weighted(LENGTHS, 700, replacement=False), ByLength(LENGTHS)]
)
def test_an_order_can_be_read_from_any_position_and_differs_between_epochs_and_seeds(order):
    stop = order.num_positions()
    whole = order.rows(32, 3, 1, 0, stop)
    for start, end in ((0, 1), (31, 65), (500, stop)):
        assert (order.rows(32, 3, 1, start, end) == whole[start:end]).all()
    assert (order.rows(32, 3, 2, 0, stop) != whole).any() and (order.rows(32, 4, 1, 0, stop) != whole).any()


def test_the_draws_stay_the_same_for_ever():
    assert Weighted(WEIGHTS, 8).rows(1, 5, 2, 0, 8).tolist() == [1, 4, 0, 4, 4, 3, 1, 4]
    assert Weighted(WEIGHTS, 4, replacement=False).rows(1, 5, 2, 0, 4).tolist() == [4, 0, 1, 3]
    assert ByLength([5, 1, 4, 2, 3, 9, 7, 8], window=2).rows(3, 5, 2, 0, 8).tolist() == [1, 2, 0, 6, 7, 5, 3, 4]


@pytest.mark.parametrize(("rows", "batch", "window"), [(1003, 32, 50), (1000, 10, 7), (5, 10, 3), (131, 16, 2)])
def test_by_length_takes_every_row_once(rows, batch, window):
    order = ByLength(LENGTHS[:rows], window=window)
    for epoch in range(3):
        assert sorted(order.rows(batch, 0, epoch, 0, rows)) == list(range(rows))


def padding(rows: np.ndarray, batch: int) -> int:
    lengths = [LENGTHS[rows[start : start + batch]] for start in range(0, len(rows), batch)]
    return sum(int(each.max() * len(each) - each.sum()) for each in lengths)


def test_batches_by_length_pad_less_and_still_come_in_any_order():
    rows = ByLength(LENGTHS).rows(32, 0, 0, 0, len(LENGTHS))
    plain = np.concatenate([p.batch.numpy() for s in batches_of(torch.arange(1003), batch_size=32) for p in s.mine()])
    assert padding(rows, 32) * 10 < padding(plain, 32)
    longest = [LENGTHS[rows[start : start + 32]].max() for start in range(0, 992, 32)]
    assert longest != sorted(longest) and longest != sorted(longest, reverse=True)


@pytest.mark.parametrize("order", [Weighted(LENGTHS[:50], 61), ByLength(LENGTHS[:50], window=3)])
def test_a_run_in_an_order_resumes_within_an_epoch_on_other_workers(order):
    settings = {"batch_size": 8, "slices": 4, "epochs": 2, "order": order}
    disturbed, undisturbed = (Ledger(lambda: torch.arange(50), **settings) for _ in range(2))
    for world_size, steps in ((2, 3), (3, 6), (1, None)):
        disturbed.run(world_size, steps)
    undisturbed.run(1)
    assert disturbed.rows == undisturbed.rows
    assert [len(rows) for rows in disturbed.rows.values()] == [order.num_positions()] * 2


def test_every_number_of_workers_takes_the_same_slices_of_an_order():
    order = Weighted(LENGTHS[:50])
    alone = pieces_by_slice(torch.arange(50), batch_size=8, slices=4, order=order)
    shared = pieces_by_slice(torch.arange(50), batch_size=8, slices=4, world_size=3, order=order)
    assert all(torch.equal(batch, shared[place]) for place, batch in alone.items()) and len(alone) == len(shared)


def test_torchs_samplers_are_taken_over():
    data = TensorDataset(torch.arange(5))
    source = as_source(DataLoader(data, sampler=WeightedRandomSampler(WEIGHTS.tolist(), 12), batch_size=4))
    assert source.order.identity() == Weighted(WEIGHTS, 12).identity()
    assert source.num_positions == 12
    drawn = as_source(DataLoader(data, sampler=RandomSampler(data, replacement=True, num_samples=9)))
    assert drawn.order.identity() == Weighted(np.ones(5), 9).identity()
    some = as_source(DataLoader(data, sampler=RandomSampler(data, num_samples=3)))
    assert some.order.identity() == Weighted(np.ones(5), 3, replacement=False).identity()
    with pytest.raises(DataError, match="5 weights, but the data has 6 rows"):
        as_source(DataLoader(torch.arange(6), sampler=WeightedRandomSampler(WEIGHTS.tolist(), 4)))


def test_a_split_keeps_the_weights_of_the_rows_it_trains_on():
    train, held_out = split(as_source(torch.arange(5), order=Weighted(WEIGHTS)), 0.4)
    assert train.order.weights.tolist() == WEIGHTS[:3].tolist() and train.num_positions == 3
    assert held_out.num_rows == 2


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Weighted([]), "one finite number per row"),
        (lambda: Weighted([1.0, float("nan")]), "one finite number per row"),
        (lambda: Weighted([0.0, 0.0]), "one of them above 0"),
        (lambda: Weighted([-1.0, 2.0]), "0 or more"),
        (lambda: Weighted(WEIGHTS, 0), "at least one row"),
        (lambda: Weighted(WEIGHTS, 2.5), "num_samples is 2.5"),
        (lambda: Weighted(WEIGHTS, 5, replacement=False), "only 4 rows have a weight above 0"),
        (lambda: ByLength(LENGTHS, window=0), "window is 0"),
        (lambda: ByLength([[1, 2]]), r"shape \(1, 2\)"),
        (lambda: as_source(torch.arange(4), order=Weighted(WEIGHTS)), "5 weights, but the data has 4 rows"),
        (lambda: as_source(lambda: iter(range(4)), order=Weighted(WEIGHTS)), "can only be read from its start"),
        (lambda: as_source(torch.arange(5), order=Weighted), "order is <class"),
    ],
)
def test_orders_that_cannot_be_are_refused(make, reason):
    with pytest.raises(DataError, match=reason) as caught:
        make()
    assert caught.value.fix


def test_workers_with_different_weights_are_refused():
    shared = ThreadExchange(2)

    def work(rank):
        return as_source(torch.arange(5), order=Weighted(WEIGHTS + rank), exchange=shared.of(rank))

    with pytest.raises(DataError, match="different data"):
        together(2, work)
