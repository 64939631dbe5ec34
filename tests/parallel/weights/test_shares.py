"""What is cut and pasted is the whole again, whichever dims and ranges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.parallel.model.tensor_shard import TensorShard, even_ranges


@pytest.mark.parametrize(
    "cuts",
    [
        lambda rank: (),
        lambda rank: ((0, (even_ranges(12, 2)[rank],)),),
        lambda rank: ((1, ((rank * 2, rank * 2 + 2), (4 + rank * 2, 6 + rank * 2))),),  # packed: a part of each half
        lambda rank: ((0, ((rank * 3, rank * 3 + 3), (6 + rank * 3, 9 + rank * 3))), (1, ((0, 8),))),
    ],
)
def test_parts_make_the_whole(cuts) -> None:
    tensor = torch.arange(96.0).view(12, 8)
    result = torch.full_like(tensor, -1.0)
    for rank in range(2):
        share = TensorShard((12, 8), cuts(rank))
        part = share.cut(tensor)
        assert tuple(part.shape) == share.local_shape
        share.paste_(result, part)
    assert torch.equal(result, tensor)


def test_two_dims_make_a_grid_of_blocks() -> None:
    tensor = torch.arange(24.0).view(4, 6)
    share = TensorShard((4, 6), ((0, ((2, 4),)), (1, ((0, 1), (3, 5)))))
    assert share.cut(tensor).tolist() == [[12.0, 15.0, 16.0], [18.0, 21.0, 22.0]]


@given(st.integers(0, 40), st.integers(1, 9))
def test_even_ranges_are_what_chunk_cuts(size: int, parts: int) -> None:
    ranges = even_ranges(size, parts)
    assert len(ranges) == parts and ranges[-1][1] == size
    chunks = [len(chunk) for chunk in torch.arange(size).chunk(parts)] if size else []
    assert [stop - start for start, stop in ranges][: len(chunks)] == chunks
    assert all(start == stop for start, stop in ranges[len(chunks) :])


def ranges_of(size: int) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    """Some, in order, that may touch."""
    ends = st.lists(st.integers(0, size), min_size=2, max_size=6).map(sorted)
    return ends.map(lambda found: tuple(zip(found[::2], found[1::2], strict=False)))


@given(st.data(), st.booleans(), st.booleans())
def test_a_part_of_a_part_is_a_part_of_the_whole(data: st.DataObject, rows: bool, columns: bool) -> None:
    tensor = torch.arange(84.0).view(12, 7)
    cuts = [(0, data.draw(ranges_of(12)))] * rows + [(1, data.draw(ranges_of(7)))] * columns
    outer = TensorShard((12, 7), tuple(cuts))
    part = outer.cut(tensor)
    inner = TensorShard(outer.local_shape, ((0, data.draw(ranges_of(len(part)))),))
    found = inner.within(outer)
    assert found.local_shape == inner.local_shape
    assert torch.equal(found.cut(tensor), inner.cut(part))
