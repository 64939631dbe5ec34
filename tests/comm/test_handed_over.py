"""What a rank hands to others is counted once, by the bytes that it puts in."""

from __future__ import annotations

import pytest
import torch

from manyhands.comm.axis import Axis
from manyhands.comm.handed_over import bytes_handed_over
from manyhands.comm.shared_memory_axis import connect_plane
from manyhands.native import why_not
from manyhands.testing import RankPool

needs_memory = pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")


def counts() -> list[int]:
    from manyhands.training.worker.worker import _current_session

    session = _current_session.get()[0]
    rank, size = session.identity.rank, session.identity.world_size
    memory = session.shared_memory
    axis = connect_plane(lambda n: memory("counted", n, size), rank, size, timeout_s=60, missing=lambda: "")
    numbers = torch.ones(1000)
    found = []
    for call in (
        lambda: axis.sum_start(numbers, "a sum").wait(),
        lambda: axis.all_gather(numbers, "all of them"),
        lambda: axis.reduce_scatter(torch.empty(500), numbers, "half of it"),
        lambda: axis.broadcast_([numbers], "the first one's"),
    ):
        before = bytes_handed_over()
        call()
        found.append(bytes_handed_over() - before)
    axis.barrier("the end")  # before the first rank takes the memory away
    session.close()
    return found


@needs_memory
def test_a_collective_hands_over_the_bytes_of_what_a_rank_puts_in(ranks: RankPool) -> None:
    first, second = ranks(2, counts)
    assert first == [4000, 4000, 4000, 4000]
    assert second == [4000, 4000, 4000, 0]


def test_a_rank_that_is_alone_hands_nothing_over() -> None:
    before = bytes_handed_over()
    Axis(0, 1).sum_start(torch.ones(1000), "a sum").wait()
    assert bytes_handed_over() == before
