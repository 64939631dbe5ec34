"""Options of tf.data's methods: each acts as there, or is refused with what to write instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import manyhands as mh
from manyhands.distribute import TensorSpec
from manyhands.errors import DataError, SpecError

AUTOTUNE = mh.Dataset.AUTOTUNE


def pairs() -> Iterator[Any]:
    for number in range(4):
        yield [float(number), 1.0], number


def test_a_signature_converts_what_a_generator_yields() -> None:
    signature = TensorSpec(shape=(None,), dtype=torch.float32), TensorSpec(shape=(), dtype="int32")
    rows = list(mh.Dataset.from_generator(pairs, output_signature=signature))
    assert [(x.dtype, y.dtype) for x, y in rows] == [(torch.float32, torch.int32)] * 4
    assert [x.tolist() for x, _ in rows] == [[float(n), 1.0] for n in range(4)] and [int(y) for _, y in rows] == [
        *range(4)
    ]
    batch = next(iter(mh.Dataset.from_generator(pairs, output_signature=signature).batch(4)))
    assert batch[0].shape == (4, 2) and batch[1].tolist() == [0, 1, 2, 3]


def test_a_signature_may_be_a_dict_with_text_and_numpys_types_and_gets_the_epoch() -> None:
    def words(prefix: str, epoch: int) -> Iterator[Any]:
        yield {"word": f"{prefix}{epoch}", "size": np.array([3], dtype=np.int64)}

    signature = {"word": TensorSpec((), "string"), "size": TensorSpec([1], np.float64)}
    data = mh.Dataset.from_generator(words, args=("w",), output_signature=signature)
    [element] = data.values(epoch=2)
    assert element["word"] == "w2" and element["size"].dtype is torch.float64 and "words" in repr(data)


@pytest.mark.parametrize(
    ("signature", "said"),
    [
        ((TensorSpec((3,)), TensorSpec((), "int64")), r"Element 0\[0\] of a generator has the shape \(2,\)"),
        ((TensorSpec((2,), "int64"), TensorSpec(())), r"Element 0\[0\] of a generator has the type float64"),
        ((TensorSpec((2,)),), "has 2 parts, and output_signature 1 parts"),
        (TensorSpec((2,)), "Element 0 of a generator has"),
        ({"x": TensorSpec((2,))}, "and output_signature the parts 'x'"),
        ((TensorSpec((2,)), TensorSpec((), "string")), r"Element 0\[1\] of a generator has a int"),
        ((TensorSpec((2,)), TensorSpec((), torch.bool)), r"Element 0\[1\] of a generator has the type int64"),
    ],
)
def test_an_element_that_is_not_as_the_signature_says_is_refused(signature: Any, said: str) -> None:
    with pytest.raises(DataError, match=said) as refused:
        list(mh.Dataset.from_generator(pairs, output_signature=signature))
    assert refused.value.fix


def test_numbers_that_a_type_cannot_hold_are_refused_with_the_number_of_the_element() -> None:
    def large() -> Iterator[int]:
        yield from (1, 200, 300)

    with pytest.raises(DataError, match="Element 2 of a generator has the type int64"):
        list(mh.Dataset.from_generator(large, output_signature=TensorSpec((), "uint8")))


def test_a_signature_that_is_none_is_refused_when_it_is_given() -> None:
    with pytest.raises(DataError, match="says neither shape nor type"):
        mh.Dataset.from_generator(pairs, output_signature=(4, 5))
    with pytest.raises(DataError, match="'float33' is no type"):
        TensorSpec((), "float33")
    with pytest.raises(SpecError, match=r"no argument 'output_types'"):
        mh.Dataset.from_generator(pairs, output_types=(torch.float32,))  # type: ignore[call-arg]


def test_an_interleave_that_leaves_its_cycle_to_us_has_one_order_on_every_machine() -> None:
    def ten(number: int) -> mh.Dataset:
        return mh.Dataset.range(number * 10, number * 10 + 3)

    tens = mh.Dataset.range(12)
    tuned = tens.interleave(ten, cycle_length=AUTOTUNE, num_parallel_calls=AUTOTUNE, deterministic=True)
    eight = [int(one) for one in tens.interleave(ten, cycle_length=8)]
    assert [int(one) for one in tuned] == eight == [int(one) for one in tens.interleave(ten, None, None)]
    assert eight[:9] == [0, 10, 20, 30, 40, 50, 60, 70, 1] and sorted(eight) == sorted(
        number * 10 + one for number in range(12) for one in range(3)
    )
    for wrong in (0, -2, "many"):
        with pytest.raises(DataError, match="cycle_length"):
            tens.interleave(ten, cycle_length=wrong)  # type: ignore[arg-type]


def test_autotune_is_taken_wherever_tf_data_has_it() -> None:
    data = mh.Dataset.range(6).map(lambda x: x + 1, num_parallel_calls=AUTOTUNE, deterministic=None)
    data = data.batch(2, num_parallel_calls=AUTOTUNE, deterministic=None).prefetch(AUTOTUNE)
    assert [one.tolist() for one in data] == [[1, 2], [3, 4], [5, 6]]
    for call in (
        lambda: data.prefetch(-3),
        lambda: data.batch(2, num_parallel_calls=-2),
        lambda: data.interleave(lambda x: mh.Dataset.range(2), num_parallel_calls="all"),  # type: ignore[arg-type]
    ):
        with pytest.raises(DataError, match=r"must be a whole number from 0 on") as refused:
            call()
        assert "AUTOTUNE" in str(refused.value)
    with pytest.raises(DataError, match="which process is faster"):
        data.batch(2, deterministic=False)


def test_padding_takes_minus_one_for_the_longest_and_tensors_for_its_values() -> None:
    def rows() -> Iterator[Any]:
        for number in range(1, 4):
            yield torch.arange(number), number

    data = mh.Dataset.from_generator(rows)
    padded = next(iter(data.padded_batch(3, padded_shapes=([-1], []), padding_values=(torch.tensor(9), np.int64(0)))))
    assert padded[0].tolist() == [[0, 9, 9], [0, 1, 9], [0, 1, 2]] and padded[1].tolist() == [1, 2, 3]


def test_a_cache_in_a_file_is_refused_with_the_reason() -> None:
    with pytest.raises(DataError, match="outlives the functions") as refused:
        mh.Dataset.range(3).cache("rows.cache")
    assert "np.save" in str(refused.value)
