"""Every kind of data that `fit` takes, and what is refused."""

import random
from collections import namedtuple
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from manyhands.data.evaluation import eval_pieces
from manyhands.data.sample_order import Position
from manyhands.data.sources.as_source import as_source, split
from manyhands.errors import DataError, DataFetchFailed
from tests.data.data_cases import (
    Counting,
    Ledger,
    ThreadExchange,
    batches_of,
    context,
    pieces_by_slice,
    shuffled_numbers,
    together,
)

X, Y = torch.randn(10, 3), torch.arange(10)


def first_batch(data, **settings):
    batches = batches_of(data, **settings)
    batch = next(next(iter(batches)).mine()).batch
    batches.close()
    return batch


def rows_of(data, column=None, **settings):
    """All rows in the order they came."""
    found = []
    for step in batches_of(data, **settings):
        for piece in step.mine():
            found += (piece.batch if column is None else piece.batch[column]).tolist()
    return found


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]
)
def test_tensors_of_any_type_keep_it(dtype):
    data = torch.arange(10).to(dtype)
    assert torch.equal(first_batch(data, shuffle=False), data[:4])
    whole = torch.cat([piece.batch for step in batches_of(data) for piece in step.mine()])
    assert whole.dtype == dtype
    assert sorted(whole.to(torch.complex64).real.tolist()) == sorted(data.to(torch.complex64).real.tolist())


@pytest.mark.parametrize("shuffle", [True, False])
def test_structures_of_tensors_and_arrays_keep_their_form(shuffle):
    pair = namedtuple("pair", "x y")
    for data in [
        (X, Y),
        [X, Y.numpy()],
        {"x": X, "y": Y},
        pair(X, Y),
        (X, {"y": Y}),
        TensorDataset(X, Y),
    ]:
        batch = first_batch(data, shuffle=shuffle)
        assert type(batch) is (list if isinstance(data, TensorDataset) else type(data))
        x, y = batch.values() if isinstance(batch, dict) else batch
        y = y["y"] if isinstance(y, dict) else y
        assert torch.equal(x, X[y])


def test_arrays_may_be_mapped_reversed_strided_or_foreign(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(10))
    for array in [
        np.load(tmp_path / "x.npy", mmap_mode="r"),
        np.arange(9, -1, -1)[::-1],
        np.arange(20)[::2] // 2,
        np.arange(10, dtype=">i4"),
    ]:
        assert sorted(rows_of(array)) == list(range(10))
        assert rows_of(array, shuffle=False) == list(range(10))


def test_a_map_style_dataset_needs_only_getitem_and_len():
    class Squares:
        def __len__(self):
            return 6

        def __getitem__(self, row):
            return {"n": row, "square": float(row**2), "word": "x" * row}

    batch = first_batch(Squares(), shuffle=False)
    assert batch["n"].tolist() == [0, 1, 2, 3]
    assert batch["square"].dtype == torch.float32
    assert batch["word"] == ["", "x", "xx", "xxx"]


def test_lists_of_examples_subsets_and_ranges_are_datasets():
    assert sorted(rows_of([(number,) for number in range(7)], column=0)) == list(range(7))
    assert sorted(rows_of(Subset(TensorDataset(Y), [1, 3, 5]), column=0)) == [1, 3, 5]
    assert sorted(rows_of(range(5))) == list(range(5))


def test_a_hugging_face_dataset_gives_columns():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict(
        {"ids": [[n, n + 1] for n in range(6)], "label": list(range(6)), "text": list("abcdef")}
    )
    batch = first_batch(data, shuffle=False)
    assert batch["ids"].tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]]
    assert batch["text"] == ["a", "b", "c", "d"]
    assert sorted(rows_of(data.with_format("torch"), column="label")) == list(range(6))
    assert sorted(rows_of(data.to_iterable_dataset(), column="label")) == list(range(6))
    with pytest.raises(DataError, match="data\\['train'\\]"):
        as_source(datasets.DatasetDict(train=data))


def test_collate_is_used_for_every_kind():
    for data in [Y, (Y, Y), list(range(10)), Counting(), lambda: iter(range(10))]:
        assert first_batch(data, collate=len) == 4


@pytest.mark.parametrize("data", [Counting(), shuffled_numbers, dict.fromkeys(range(10)).keys()])
def test_streams_are_shared_out_without_loss(data):
    alone = pieces_by_slice(data, batch_size=4, slices=2)
    assert pieces_by_slice(data, batch_size=4, slices=2, world_size=2).keys() == alone.keys()
    for place, batch in pieces_by_slice(data, batch_size=4, slices=2, world_size=2).items():
        assert torch.equal(batch, alone[place])


def test_a_stream_resumes_in_the_middle_of_an_epoch_on_other_workers():
    ledger = Ledger(lambda: shuffled_numbers, batch_size=4, slices=2, epochs=2)
    for world_size, steps in ((2, 2), (3, 6), (1, None)):
        ledger.run(world_size, steps)
    assert sorted(ledger.rows[0]) == sorted(ledger.rows[1]) == list(range(23))
    undisturbed = Ledger(lambda: shuffled_numbers, batch_size=4, slices=2, epochs=2)
    undisturbed.run(1)
    assert undisturbed.rows == ledger.rows
    assert ledger.rows[0] != ledger.rows[1]


@pytest.mark.slow
def test_a_stream_may_be_read_by_a_loader_process():
    alone = pieces_by_slice(shuffled_numbers, batch_size=4, slices=2)
    ahead = pieces_by_slice(shuffled_numbers, batch_size=4, slices=2, num_workers=1)
    assert all(torch.equal(batch, ahead[place]) for place, batch in alone.items())


def test_a_past_step_of_a_stream_can_be_read_again():
    batches = iter(batches_of(shuffled_numbers, batch_size=4, slices=2))
    first = next(batches)
    expected = first.slice(1).batch
    next(batches)
    assert torch.equal(first.slice(1).batch, expected)


def test_a_generator_function_receives_the_epoch_if_it_asks():
    def rows(epoch):
        yield from range(epoch * 10, epoch * 10 + 3)

    assert rows_of(rows, epochs=2) == [0, 1, 2, 10, 11, 12]


def test_an_endless_stream_ends_with_steps():
    def rows():
        number = 0
        while True:
            yield number
            number += 1

    assert rows_of(rows, steps=3) == list(range(12))
    assert batches_of(rows, steps=3).steps_per_epoch is None


def test_a_stream_that_raises_or_is_empty_or_shorter_than_before_says_so():
    def torn():
        yield 1
        raise ValueError("no more")

    with pytest.raises(DataFetchFailed, match=r"row 1 of the stream, for step 1 of epoch 1, failed\. ValueError"):
        rows_of(torn)
    with pytest.raises(DataError, match="returned a tuple"):
        rows_of(lambda: (X, Y))
    with pytest.raises(DataError, match="no rows in epoch 1"):
        rows_of(lambda: iter(()))
    with pytest.raises(DataError, match="ended after 10 rows of epoch 1, but 12 were already used"):
        rows_of(Counting(), position=Position(0, 0, 12), first_step=4)


def test_a_function_of_the_context_gives_the_whole_data():
    seen = []

    def data(context):
        seen.append(context)
        return torch.arange(10)

    ledger = Ledger(lambda: data, batch_size=4, slices=4)
    ledger.run(2)
    assert sorted(ledger.rows[0]) == list(range(10))
    assert [(c.worker, c.num_workers, c.slices, c.num_slices) for c in seen] == [(0, 2, (0, 1), 4), (1, 2, (2, 3), 4)]


def test_a_function_of_the_context_may_give_each_slice_its_own_data():
    lengths = {0: 5, 1: 2, 2: 7, 3: 1}

    def data(context):
        return {v: torch.arange(v * 10, v * 10 + lengths[v]) for v in context.slices}

    everything = sorted(v * 10 + row for v, length in lengths.items() for row in range(length))
    ledger = Ledger(lambda: data, batch_size=8, slices=4, epochs=2)
    ledger.run(1, num_steps=3)
    ledger.run(1)
    assert sorted(ledger.rows[0]) == sorted(ledger.rows[1]) == everything

    shared = ThreadExchange(2)

    def work(rank):
        batches = batches_of(data, batch_size=8, slices=4, rank=rank, world_size=2, exchange=shared.of(rank))
        return [(s.number, p.index, p.batch.tolist()) for s in batches for p in s.mine()]

    alone = [(s.number, p.index, p.batch.tolist()) for s in batches_of(data, batch_size=8, slices=4) for p in s.mine()]
    assert sorted(chain.from_iterable(together(2, work))) == sorted(alone)


def test_slices_with_separate_streams_run_for_a_number_of_steps_and_resume():
    def data(context):
        def stream(v):
            def rows():
                yield from range(v * 10, v * 10 + 3)

            return rows

        return {v: stream(v) for v in context.slices}

    whole = rows_of(data, batch_size=4, slices=2, steps=4)
    assert whole == [0, 1, 10, 11, 2, 0, 12, 10, 1, 2, 11, 12, 0, 1, 10, 11]
    assert rows_of(data, batch_size=4, slices=2, steps=4, position=Position(0, 0, 8), first_step=3) == whole[8:]
    with pytest.raises(DataError, match="no epochs"):
        rows_of(data, batch_size=4, slices=2, epochs=2)
    source = as_source(data, context=context(slices=2))
    pieces = list(eval_pieces(source, batch_size=2, rank=0, world_size=1))
    assert sorted(row for piece in pieces for row in piece.batch.tolist()) == [0, 1, 2, 10, 11, 12]
    assert len({piece.index for piece in pieces}) == len(pieces)


def test_a_dataloader_lends_its_dataset_collate_and_processes():
    source = as_source(DataLoader(TensorDataset(Y), batch_size=5, shuffle=True))
    assert (source.loader_batch_size, source.shuffle, source.fetched_by) == (5, True, "memory")
    assert rows_of(DataLoader(TensorDataset(Y), batch_size=5), column=0) == list(range(10))  # unshuffled, as it says
    assert first_batch(DataLoader(list(range(10)), batch_size=5, collate_fn=len)) == 4
    assert as_source(DataLoader(list(range(10)), batch_size=5, num_workers=2)).num_workers == 2
    assert rows_of(DataLoader(Counting(), batch_size=5)) == list(range(10))


def test_a_dataloader_with_a_custom_order_is_refused():
    for own in (SubsetRandomSampler([1, 2]), SequentialSampler(range(5)), RandomSampler(range(10), num_samples=15)):
        with pytest.raises(DataError, match=f"its own sampler \\({type(own).__name__}\\)"):
            as_source(DataLoader(TensorDataset(Y), sampler=own))
    distributed = DistributedSampler(TensorDataset(Y), num_replicas=2, rank=0)
    with pytest.raises(DataError, match="DistributedSampler") as caught:
        as_source(DataLoader(TensorDataset(Y), sampler=distributed))
    assert "the same on every worker" in caught.value.fix[0]
    with pytest.raises(DataError, match="makes its batches itself"):
        as_source(DataLoader(TensorDataset(Y), batch_sampler=[[0, 1], [2]]))
    with pytest.raises(DataError, match="makes its batches itself"):
        as_source(DataLoader(Counting(), batch_size=None))


class NoLength(Dataset):
    def __getitem__(self, row):
        return row


class Frame:
    iloc = None

    def __len__(self):
        return 3

    def __getitem__(self, name):
        return name


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ((X, Y[:5]), r"data\[0\] has 10, data\[1\] has 5"),
        ((X, "text"), r"data\[1\] is a str"),
        (np.array(["a", "b"]), "numpy array of <U1"),
        (torch.tensor(3.0), "without rows"),
        ((), "empty tuple"),
        ([], "no rows"),
        (torch.empty(0, 3), "no rows"),
        ([torch.zeros(3)] * 20, "list of 20 tensors may be columns or examples"),
        (iter(range(3)), "read only once"),
        ((number for number in range(3)), "read only once"),
        (NoLength(), "no length"),
        (Frame(), "indexed by column"),
        (7, "cannot be a int"),
        (lambda one, two: None, "needs one, two"),
        (lambda context: {5: Y}, r"gave slices \[5\], but this worker computes \[0\]"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(data, reason):
    with pytest.raises(DataError, match=reason) as caught:
        as_source(data)
    assert caught.value.fix


def test_workers_that_were_given_different_data_are_refused():
    shared = ThreadExchange(2)
    with pytest.raises(DataError, match="rank 0: RowSource, 5 rows; rank 1: RowSource, 6 rows"):
        together(2, lambda rank: as_source(torch.arange(5 + rank), exchange=shared.of(rank)))


def test_ignored_settings_are_warned_about():
    with pytest.warns(UserWarning, match="num_workers=2 is ignored"):
        as_source(X, num_workers=2)
    with pytest.warns(UserWarning, match="one loader process"):
        as_source(Counting(), num_workers=4)


def test_a_validation_split_takes_the_last_rows():
    train, validation = split((X, Y), 0.3)
    assert sorted(rows_of(train, column=1)) == list(range(7))
    found = [row for p in eval_pieces(validation, batch_size=2, rank=0, world_size=1) for row in p.batch[1].tolist()]
    assert found == [7, 8, 9]
    for fraction in (0.0, 1.0, 1.5, 0.999):
        with pytest.raises(DataError, match="leaves"):
            split((X, Y), fraction)
    with pytest.raises(DataError, match="needs data with a length"):
        split(Counting(), 0.5)


def test_the_same_seed_draws_the_same_order_after_any_other_draws():
    random.seed(1)
    first = rows_of(Y, seed=3)
    torch.manual_seed(99)
    assert rows_of(Y, seed=3) == first
    assert rows_of(Y, seed=4) != first
