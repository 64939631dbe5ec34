"""Who is odd, and what tensors hold in one number: pure, and the same with the C extension as without."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.native import library
from manyhands.parallel.replicas import fingerprint
from manyhands.parallel.replicas.divergence import Hashes, appoint, odd_ones, verdict, wrong_one


def notes(*own: int) -> list[Hashes]:
    return [Hashes(one) for one in own]


def test_copies_that_agree_have_no_odd_one() -> None:
    assert verdict(notes(5, 5)).agrees and verdict(notes(5)).agrees


def test_of_three_copies_the_odd_one_is_named_and_healed_from_a_right_one() -> None:
    assert verdict(notes(5, 5, 6)) == ((2,), 0)
    assert verdict(notes(6, 5, 5)) == ((0,), 1)
    assert verdict(notes(5, 6, 7, 5, 5)) == ((1, 2), 0)


@pytest.mark.parametrize("own", [(5, 6), (5, 5, 6, 6), (5, 6, 7)])
def test_without_a_majority_no_copy_can_be_called_right(own: tuple[int, ...]) -> None:
    assert verdict(notes(*own)) == (tuple(range(len(own))), None)


def test_a_host_whose_shared_weights_are_odd_is_odd_as_a_whole() -> None:
    hashes = [Hashes(1, 10), Hashes(1, 20), Hashes(1, 10), Hashes(1, 21), Hashes(1, 10), Hashes(1, 20)]
    assert verdict(hashes, per_host=2) == ((2, 3), 0)
    assert verdict(hashes[:4], per_host=2) == ((0, 1, 2, 3), None), "two hosts, two copies"
    assert verdict([Hashes(1, 10), Hashes(1, 20)] * 2, per_host=2).agrees


def test_a_rank_whose_own_state_is_odd_is_odd_alone_though_its_host_shares_weights() -> None:
    hashes = [Hashes(1, 10), Hashes(2, 20), Hashes(1, 10), Hashes(1, 20)]
    assert verdict(hashes, per_host=2) == ((1,), 0)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=7))
def test_the_right_ones_are_always_more_than_half(hashes: list[int]) -> None:
    odd = odd_ones(hashes)
    if odd is None:
        assert all(2 * hashes.count(one) <= len(hashes) for one in hashes)
    else:
        right = [one for place, one in enumerate(hashes) if place not in odd]
        assert len(set(right)) == 1 and 2 * len(right) > len(hashes)


def test_of_two_ranks_the_one_that_does_not_repeat_itself_is_wrong() -> None:
    assert wrong_one((True, False)) == 1
    assert wrong_one((False, True)) == 0
    assert wrong_one((True, True)) is None
    assert wrong_one((False, False)) is None


def test_every_slice_is_audited_some_day_and_the_same_everywhere() -> None:
    shares = [range(2), range(2, 2), range(2, 5)]
    found = [appoint(0, step, shares) for step in range(100)]
    assert {one.place for one in found} == set(range(5))
    assert all(one.place in shares[one.owner] for one in found)
    assert all({one.owner, one.auditor, one.third} == {0, 1, 2} for one in found)
    assert appoint(0, 7, shares[::2]).third is None, "there are two"
    assert [appoint(1, step, shares).place for step in range(100)] != [one.place for one in found]


TENSORS = [
    torch.arange(numel, dtype=torch.float64).mul(0.37).to(dtype)
    for numel in (0, 1, 3, 16, 17, 255, 4099)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool)
]


@pytest.mark.skipif(library is None, reason="NOT SHOWN HERE: the C extension is not built")
def test_both_versions_of_the_digest_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    in_c = [fingerprint.digest(one) for one in TENSORS]
    monkeypatch.setattr(fingerprint, "library", None)
    assert [fingerprint.digest(one) for one in TENSORS] == in_c


@given(st.integers(0, 4098), st.integers(0, 31))
def test_one_bit_changes_the_digest_and_so_do_values_that_change_places(place: int, bit: int) -> None:
    values = torch.randn(4099, generator=torch.Generator().manual_seed(1))
    before = fingerprint.digest(values)
    flipped = values.clone()
    flipped.view(torch.int32)[place] ^= 1 << bit if bit < 31 else -(2**31)
    assert fingerprint.digest(flipped) != before
    moved = values.roll(place + 1)
    assert torch.equal(moved, values) == (fingerprint.digest(moved) == before)


def test_memory_formats_do_not_count_but_names_do() -> None:
    image = torch.randn(2, 3, 4, 5)
    last = image.to(memory_format=torch.channels_last)
    assert fingerprint.digest(image) == fingerprint.digest(last)
    assert fingerprint.fingerprint([("a", image)]) != fingerprint.fingerprint([("b", image)])
    assert fingerprint.fingerprint([("a", image)], [1]) != fingerprint.fingerprint([("a", image)], [2])
