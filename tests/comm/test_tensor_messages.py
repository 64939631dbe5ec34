"""Values and tensors as frames: what was packed is unpacked the same, and other frames are refused."""

from __future__ import annotations

import gc
import math
import weakref
from http import HTTPStatus
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from manyhands.comm.tensor_messages import DTYPES, Placeholder, pack, tensor_from, unpack
from manyhands.errors import UsageError

leaves = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text() | st.binary()
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, float) and math.isnan(left):
        return isinstance(right, float) and math.isnan(right)
    return type(left) is type(right) and left == right


@settings(max_examples=50, deadline=None)
@given(values)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    assert same(unpack(pack(value, "it")), value)


@pytest.mark.parametrize("name", DTYPES)
def test_tensors_of_every_type_come_back_bit_for_bit(name: str) -> None:
    data = torch.randint(0, 2, (3, 16), dtype=torch.uint8)
    tensor = data.view(DTYPES[name]) if DTYPES[name] != torch.bool else data.bool()
    [found, again] = unpack(pack([tensor, tensor[:, :1]], "it"))
    assert found.dtype == tensor.dtype and torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
    assert torch.equal(again.contiguous().view(torch.uint8), tensor[:, :1].contiguous().view(torch.uint8))


def test_placeholders_are_filled_by_the_process_that_unpacks() -> None:
    frames = pack((1, [Placeholder("dataset", 4, "numbers")]), "it")
    assert unpack(frames, lambda found: found.number) == (1, [4])


def test_numbers_and_text_of_other_kinds_come_back_as_plain_ones() -> None:
    given = [np.float64(2.5), np.int64(-3), np.bool_(True), np.str_("å"), HTTPStatus.OK]
    assert same(unpack(pack(given, "it")), [2.5, -3, True, "å", 200])


def test_what_leads_back_to_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UsageError, match="nested too deeply"):
        pack(endless, "it")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=3))
def test_frames_that_pack_did_not_make_are_a_value_or_refused(frames: list[bytes]) -> None:
    try:
        unpack(frames)
    except ValueError:
        return


def extension(code: int, content: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, msgspec.msgpack.encode(content)))


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [extension(1, ["float32", [2], 0])],
        [extension(1, ["float32", [2], 5]), b"\0" * 8],
        [extension(1, ["float32", [2], -1]), b"\0" * 8],
        [extension(1, ["float32", [3], 0]), b"\0" * 8],
        [extension(1, ["float32", [-2], 0]), b"\0" * 8],
        [extension(1, ["float32", [2**62, 4], 0]), b""],
        [extension(1, ["float32", [0, 2**62, 2**62], 0]), b""],
        [extension(1, ["object", [1], 0]), b"\0" * 8],
        [extension(1, ["float32", [1] * 65, 0]), b"\0" * 4],
        [extension(2, {"a": 1})],
        [extension(3, ["dataset"])],
        [extension(9, [])],
        [b"\x91" * 100_000],
    ],
)
def test_tensors_that_do_not_fit_their_bytes_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - any of them
        unpack(frames)


def test_a_tensor_owns_its_memory() -> None:
    data = bytes(8)
    tensor_from(data, (2,), "float32").fill_(1.0)
    assert data == bytes(8)


class Received(bytearray):
    """A frame that is seen to be freed."""


def test_frames_are_free_as_soon_as_the_value_is_dropped() -> None:
    frames = [Received(frame) for frame in pack((1, {"w": torch.ones(4)}), "it")]
    alive = [weakref.ref(frame) for frame in frames]
    gc.disable()  # as within a step
    try:
        value = unpack(frames)
        assert torch.equal(value[1]["w"], torch.ones(4))
        del value, frames
        assert not any(one() for one in alive), "a reference cycle keeps them until garbage is collected"
    finally:
        gc.enable()
