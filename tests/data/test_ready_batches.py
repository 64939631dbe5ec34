"""Data that comes in batches already: recognised or asked about, cut into slices, never taken for examples."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from manyhands.data.evaluation import eval_pieces
from manyhands.data.ready_batches import cut_rows, num_rows_of
from manyhands.data.sources.as_source import as_source, describe
from manyhands.errors import DataError
from tests.data.data_cases import Ledger, batches_of, pieces_by_slice

SIZES = (6, 6, 1, 9, 3)
X = torch.arange(25.0).reshape(25, 1) * torch.ones(1, 3)


def unequal():
    """25 rows in batches of different sizes, shuffled by the stream itself."""
    order = list(range(25))
    random.shuffle(order)
    for size in SIZES:
        rows, order = order[:size], order[size:]
        yield X[rows], torch.tensor(rows)


class OwnIter(DataLoader):
    def __iter__(self):
        for x, y in super().__iter__():
            yield x * 10, y


def rows_of(batches):
    return [row for step in batches for piece in step.mine() for row in piece.batch[1].tolist()]


def test_each_ready_batch_is_one_global_batch_cut_into_slices():
    steps = [
        (s.number, s.start, s.rows, s.num_slices, s.last_of_epoch) for s in batches_of(unequal, slices=4, batched=True)
    ]
    # Less than the slices: half as many slices as rows, as with any short batch.
    assert steps == [
        (1, 0, 6, 4, False), (2, 6, 6, 4, False), (3, 12, 1, 1, False), (4, 13, 9, 4, False), (5, 22, 3, 1, True),
    ]  # fmt: skip
    for (_step, _v), (x, y) in pieces_by_slice(unequal, slices=4, batched=True).items():
        assert torch.equal(x[:, 0].long(), y)
    assert sorted(rows_of(batches_of(unequal, slices=4, batched=True))) == list(range(25))


def test_any_number_of_workers_takes_the_same_slices_of_ready_batches():
    alone = pieces_by_slice(unequal, slices=4, batched=True, epochs=2)
    for world_size in (2, 3):
        shared = pieces_by_slice(unequal, slices=4, batched=True, epochs=2, world_size=world_size)
        assert alone.keys() == shared.keys()
        assert all(torch.equal(batch[1], shared[place][1]) for place, batch in alone.items())


@pytest.mark.parametrize("batched", [True, False], ids=["batches", "rows"])
def test_a_step_of_a_stream_can_be_finished_after_its_batches_were_closed(batched):
    """As workers do that lost another one in the middle of a step: its slices are computed by those that are left."""
    data = unequal if batched else (lambda: iter(range(25)))
    settings = {"slices": 3, "batch_size": 6, "batched": batched, "collate": None if batched else torch.tensor}
    whole = pieces_by_slice(data, **settings)
    batches = batches_of(data, rank=1, world_size=2, **settings)
    next(batches)
    step = next(batches)
    batches.close()
    for v in range(step.num_slices):
        found, expected = step.slice(v).batch, whole[2, v]
        assert torch.equal(found[1] if batched else found, expected[1] if batched else expected)


def test_ready_batches_resume_within_an_epoch_on_other_workers():
    def numbers():
        return (y for _x, y in unequal())

    disturbed, undisturbed = (Ledger(lambda: numbers, slices=4, epochs=2, batched=True) for _ in range(2))
    for world_size, steps in ((2, 2), (3, 5), (1, None)):
        disturbed.run(world_size, steps)
    undisturbed.run(1)
    assert disturbed.rows == undisturbed.rows
    assert sorted(disturbed.rows[0]) == sorted(disturbed.rows[1]) == list(range(25))
    assert disturbed.rows[0] != disturbed.rows[1]


def test_ready_batches_that_changed_since_the_run_stopped_are_refused():
    ledger = Ledger(lambda: lambda: iter([torch.arange(5)] * 4), batched=True)
    ledger.run(1, 2)
    with pytest.raises(DataError, match="had used 10 rows of epoch 1, but a batch of the stream now ends at row 12"):
        list(batches_of(lambda: iter([torch.arange(6)] * 4), batched=True, position=ledger.position, first_step=3))


@pytest.mark.slow
def test_a_loader_process_may_read_ready_batches_ahead():
    alone = pieces_by_slice(unequal, slices=2, batched=True)
    ahead = pieces_by_slice(unequal, slices=2, batched=True, num_workers=1)
    assert all(torch.equal(batch[1], ahead[place][1]) for place, batch in alone.items())


def test_an_evaluation_takes_each_ready_batch_as_one_piece():
    source = as_source(unequal, batched=True)
    pieces = [list(eval_pieces(source, batch_size=4, rank=rank, world_size=2)) for rank in range(2)]
    assert [[p.rows for p in part] for part in pieces] == [[6, 1, 3], [6, 9]]
    assert sorted(row for part in pieces for p in part for row in p.batch[1].tolist()) == list(range(25))


def test_a_loss_that_changes_its_slice_does_not_change_the_users_data():
    batches = [(torch.zeros(4, 2), np.zeros(4))]
    for step in batches_of(batches, batched=True):
        for piece in step.mine():
            piece.batch[0].add_(1)
            piece.batch[1].add_(1)
    assert not batches[0][0].any() and not batches[0][1].any()


def test_what_a_batch_may_be_made_of():
    boxes = [{"boxes": torch.zeros(number, 4)} for number in (1, 2, 3)]
    images = [torch.zeros(3, 8, 8 + number) for number in range(3)]
    batch = {"x": (torch.zeros(3, 2), np.arange(3)), "text": ["a", "b", "c"], "boxes": boxes}
    assert num_rows_of(batch) == num_rows_of((images, boxes)) == num_rows_of([images, boxes]) == num_rows_of(boxes) == 3
    cut = cut_rows(batch, 1, 3)
    assert cut["text"] == ["b", "c"] and cut["x"][1].tolist() == [1, 2] and cut["boxes"] == boxes[1:]
    assert [image.shape for image in cut_rows((images, boxes), 2, 3)[0]] == [(3, 8, 10)]
    assert isinstance(cut_rows([torch.zeros(3), torch.ones(3)], 0, 1), list)


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ((torch.zeros(8), 3), r"batch\[1\] is one number"),
        ((torch.zeros(8), torch.tensor(3)), r"batch\[1\] is one number"),
        ({"x": torch.zeros(4, 8), "y": torch.zeros(5)}, r"batch\['x'\] has 4, batch\['y'\] has 5"),
        ({"x": torch.zeros(4), "name": "text"}, r"batch\['name'\] is a str"),
        ({"x": torch.zeros(4), "more": object()}, r"batch\['more'\] is a object"),
        (torch.zeros(0, 3), "no rows"),
        ({}, "no columns"),
    ],
)
def test_single_examples_and_uneven_columns_are_refused_by_name(item, reason):
    with pytest.raises(DataError, match=reason) as caught:
        list(batches_of(lambda: iter([item] * 3), batched=True))
    assert caught.value.fix


def pairs():
    yield from [(torch.zeros(32, 8), torch.zeros(32))] * 12


class Pairs(IterableDataset):
    __iter__ = staticmethod(pairs)


@pytest.mark.parametrize("data", [pairs, Pairs(), list(pairs()), lambda: [{"x": torch.zeros(4, 2), "y": np.zeros(4)}]])
def test_items_that_may_be_batches_are_asked_about(data):
    with pytest.raises(DataError, match=r"may be a whole batch or one example: item\[.*\] is \d+ x \d+") as caught:
        list(batches_of(data))
    assert [fix.split(":")[0].split(",")[0] for fix in caught.value.fix] == ["batched=True", "batched=False"]
    with pytest.raises(DataError, match="may be a whole batch"):
        list(eval_pieces(as_source(data), batch_size=4, rank=0, world_size=1))


def test_said_to_be_examples_they_are_examples_and_said_to_be_batches_they_are_batches():
    assert len(list(batches_of(pairs, batch_size=4, batched=False))) == 3
    assert len(list(batches_of(pairs, batched=True))) == 12
    assert describe(as_source(pairs, batched=True)) == "a stream of batches, each one global batch"
    assert describe(as_source(pairs, batched=False)) == "a stream of examples"


@pytest.mark.parametrize("item", [3, torch.zeros(8), (torch.zeros(8), 1), (torch.zeros(8), torch.zeros(3)), {"x": 1.0}])
def test_items_that_are_examples_are_not_asked_about(item):
    assert next(iter(batches_of(lambda: iter([item] * 8)))).rows == 4
    assert next(iter(batches_of(lambda: iter([(torch.zeros(4), torch.zeros(4))] * 8), collate=len))).rows == 4


def test_a_loader_with_ready_batches_is_refused_or_read_as_it_is():
    data = TensorDataset(X, torch.arange(25))
    own = OwnIter(data, batch_size=10)
    sampled = DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 10, drop_last=False))
    for loader, reason in ((own, "OwnIter with its own __iter__"), (sampled, "a batch_sampler")):
        with pytest.raises(DataError, match=reason) as caught:
            as_source(loader)
        assert caught.value.fix[0].startswith("batched=True")
    x, y = next(p.batch for s in batches_of(own, batched=True) for p in s.mine())
    assert torch.equal(x[:, 0], 10 * y.float())
    seen = [rows_of(batches_of(sampled, batched=True, slices=2)) for _ in range(2)]
    assert seen[0] == seen[1] != list(range(25)) and sorted(seen[0]) == list(range(25))
    assert rows_of(batches_of(sampled, batched=True, slices=2, seed=1)) != seen[0]


def test_a_generator_of_a_loaders_own_gives_the_same_batches_each_time_an_epoch_is_read():
    data = TensorDataset(X, torch.arange(25))
    loader = DataLoader(data, batch_size=10, shuffle=True, generator=torch.Generator().manual_seed(3))
    two_epochs = rows_of(batches_of(loader, batched=True, epochs=2))
    assert rows_of(batches_of(loader, batched=True, epochs=2)) == two_epochs
    assert two_epochs[:25] != two_epochs[25:]


def test_every_setting_of_a_loader_that_is_not_used_is_named():
    data = TensorDataset(X)
    settings = {
        "drop_last": {"drop_last": True},
        "generator": {"shuffle": True, "generator": torch.Generator()},
        "worker_init_fn": {"worker_init_fn": print},
        "prefetch_factor": {"num_workers": 1, "prefetch_factor": 7},
        "multiprocessing_context": {"num_workers": 1, "multiprocessing_context": "fork"},
    }
    for name, given in settings.items():
        with pytest.warns(UserWarning, match=f"From the DataLoader, {name}"):
            as_source(DataLoader(list(data), batch_size=4, **given))
    assert as_source(DataLoader(list(data), batch_size=4, num_workers=1, timeout=5)).loader_timeout_s == 5
    with pytest.warns(UserWarning, match="num_workers=1 is not used"):
        as_source(DataLoader(list(data), num_workers=1), batched=True)


@pytest.mark.parametrize(
    ("data", "more", "reason"),
    [
        ((X, X), {}, "batches of batch_size rows"),
        ("*.npy", {}, "batches of batch_size rows"),
        (unequal, {"collate": len}, "a batch already"),
        (lambda context: {0: unequal}, {}, "separate data for each slice"),
    ],
)
def test_batched_is_refused_where_it_cannot_be(data, more, reason):
    with pytest.raises(DataError, match=reason) as caught:
        as_source(data, batched=True, **more)
    assert caught.value.fix
