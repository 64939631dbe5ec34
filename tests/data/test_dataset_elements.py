"""`mh.Dataset`: what becomes of single elements: types, batches of unlike ones, and what random functions draw."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import manyhands as mh
from manyhands.data.sources.as_source import as_source
from manyhands.errors import DataError
from tests.data.test_dataset_chains import Run, elements, plain

NUMBERS = mh.Dataset.range(3)


def drawn(data, epoch=0):
    return [value for _, value in elements(data.map(lambda x: (x, random.random())), epoch)]


def test_no_two_examples_of_a_chain_draw_the_same():
    for data in [
        NUMBERS.repeat(2).repeat(2),
        NUMBERS.concatenate(NUMBERS).concatenate(NUMBERS),
        NUMBERS.concatenate(NUMBERS.concatenate(NUMBERS)),
        NUMBERS.concatenate(NUMBERS).repeat(2),
        NUMBERS.repeat(2).concatenate(NUMBERS),
        mh.Dataset.range(2).interleave(lambda n: mh.Dataset.range(3).repeat(2)),
        mh.Dataset.range(2).interleave(lambda n: mh.Dataset.range(3).concatenate(mh.Dataset.range(3))).repeat(2),
    ]:
        for one in (data, data.filter(lambda x: True)):
            found = drawn(one) + drawn(one, 1)
            assert len(set(found)) == len(found)


def test_the_function_of_an_interleave_draws_the_same_on_every_worker():
    def chosen(_):
        return mh.Dataset.from_tensor_slices([random.random(), float(torch.rand(())), float(np.random.rand())])

    data = mh.Dataset.range(4).interleave(chosen)
    random.seed(1), torch.manual_seed(1), np.random.seed(1)
    first = elements(data)
    random.seed(2), torch.manual_seed(2), np.random.seed(2)
    assert elements(data) == first and len(set(map(float, first))) == 12


def test_a_generator_may_fill_one_array_again_and_again():
    def same_array():
        row = {"x": np.zeros(2)}
        for number in range(5):
            row["x"][:] = number
            yield row

    data = mh.Dataset.from_generator(same_array)
    assert [batch["x"][:, 0].tolist() for batch in data.batch(3)] == [[0, 1, 2], [3, 4]]
    assert sorted(row["x"][0] for row in elements(data.shuffle(5))) == [0, 1, 2, 3, 4]


def test_padding_keeps_fractions_whichever_element_is_first():
    rows = [[1, 2], [1.5], []]
    data = mh.Dataset.range(3).map(lambda n: rows[n])
    (batch,) = data.padded_batch(3)
    assert batch.tolist() == [[1, 2], [1.5, 0], [0, 0]] and batch.dtype == torch.float32
    (batch,) = data.padded_batch(3, padding_values=float("nan"))
    assert torch.isnan(batch).sum() == 3
    whole = mh.Dataset.range(3).map(lambda n: torch.arange(n))
    for fill in (0.5, float("nan")):
        with pytest.raises(DataError, match="int64 cannot hold"):
            list(whole.padded_batch(3, padding_values=fill))
    with pytest.raises(DataError, match="pads numbers"):
        list(whole.map(lambda n: ["a"] * len(n)).padded_batch(3))


def test_a_batch_of_lists_is_the_same_through_a_map_or_straight_from_a_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"v": [1, 2], "t": ["a"], "d": {"q": 1.5}}\n{"v": [3, 4], "t": ["b", "c"], "d": {"q": 2}}\n')
    wanted = {"v": [[1, 2], [3, 4]], "t": [["a"], ["b", "c"]], "d": {"q": [1.5, 2.0]}}
    data = mh.Dataset.from_files(str(path))
    chains = [data, data.shuffle("full", seed=1), data.map(lambda row: row), data.filter(lambda row: True)]
    for one in chains:
        (batch,) = [step[2][0] for step in Run(one.batch(2), slices=1).steps(epochs=1)[0]]
        assert batch in (wanted, {key: turned(value) for key, value in wanted.items()})
        assert plain(next(iter(one.batch(2)))) in (wanted, {key: turned(value) for key, value in wanted.items()})
    path.write_text('{"v": [1, 2]}\n{"v": [3]}\n')
    for one in [data, data.map(lambda row: row)]:
        with pytest.raises(DataError, match=r"differ in shape: \[1\], \[2\]"):
            as_source(one.batch(2)).take(np.arange(2))


def turned(value):
    return {"q": value["q"][::-1]} if isinstance(value, dict) else value[::-1]


def test_batches_of_an_endless_repeat_can_be_shuffled_and_cut():
    endless = mh.Dataset.range(10).repeat().batch(3)
    assert endless.cardinality() == mh.Dataset.INFINITE_CARDINALITY
    found = elements(endless.shuffle(4).take(10))
    assert all(len(batch) == 3 for batch in found) and len({tuple(batch) for batch in found}) == 10
    assert endless.shard(2, 1).skip(1).map(lambda x: x).cardinality() == mh.Dataset.INFINITE_CARDINALITY


def test_columns_of_text_may_be_nested_and_tables_given():
    rows = ({"name": ["x", "y"], "n": [1, 2]}, [0, 1])
    assert elements(mh.Dataset.from_tensor_slices(rows)) == [({"name": "x", "n": 1}, 0), ({"name": "y", "n": 2}, 1)]
    with pytest.raises(DataError, match=r"number of rows: \[2, 3\]"):
        mh.Dataset.from_tensor_slices(({"name": ["x", "y"]}, [0, 1, 2]))
    with pytest.raises(DataError, match="differ in shape"):
        mh.Dataset.from_tensor_slices([[1], [1, 2]])


def test_a_table_of_pandas_is_its_columns():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"x": [1.0, 2.0], "name": ["u", "v"]})
    found = elements(mh.Dataset.from_tensor_slices((dict(table), table["x"])))
    assert found == [({"x": 1.0, "name": "u"}, 1.0), ({"x": 2.0, "name": "v"}, 2.0)]


def test_zip_does_not_leave_out_the_dataset_that_it_is_called_on():
    with pytest.raises(DataError, match=r"as in a\.zip\(b\)"):
        NUMBERS.zip(NUMBERS)
    assert elements(mh.Dataset.zip((NUMBERS,))) == [(0,), (1,), (2,)]
