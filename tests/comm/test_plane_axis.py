"""Sums over ranks that share memory, through the calls that every axis has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from manyhands.comm.shared_memory import AREA_BYTES
from manyhands.comm.shared_memory_axis import connect_plane
from manyhands.errors import TrainingFailed
from manyhands.native import why_not
from manyhands.testing import RankPool

needs_memory = pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")
# Nothing, one element, an odd number, more than a turn has room for.
SIZES = (0, 1, 1001, AREA_BYTES // 4 + 77)


def contribution(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)


def sums(dtype: torch.dtype) -> list[Tensor]:
    from manyhands.training.worker.worker import _current_session

    session = _current_session.get()[0]
    rank, size = session.identity.rank, session.identity.world_size
    memory = session.shared_memory
    axis = connect_plane(lambda n: memory("sums", n, size), rank, size, timeout_s=60, missing=lambda: "")
    found = [contribution(rank, count, dtype) for count in SIZES]
    for tensor in found:
        axis.sum_start(tensor, "a sum").wait()
    axis.barrier("the end")  # before the first rank takes the memory away
    session.close()
    return found


def different_things() -> str:
    from manyhands.training.worker.worker import _current_session

    session = _current_session.get()[0]
    rank, size = session.identity.rank, session.identity.world_size
    memory = session.shared_memory
    axis = connect_plane(lambda n: memory("unlike", n, size), rank, size, timeout_s=20, missing=lambda: "")
    axis.plane.barrier("the same")
    try:
        if rank == 1:
            axis.plane.barrier("gradients of step 5")
        else:
            axis.sum_start(torch.ones(4), "a sum of " + 100 * "x").wait()
    except TrainingFailed as failed:
        return str(failed)
    finally:
        session.close()
    return "nothing was said"


@needs_memory
def test_ranks_that_synchronise_for_different_operations_get_an_error(ranks: RankPool) -> None:
    """A sum and a barrier could complete each other."""
    cut = "a sum of " + 51 * "x"
    for error in ranks(3, different_things):
        assert f"rank 0 '{cut}', rank 1 'gradients of step 5', rank 2 '{cut}'." in error


@needs_memory
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sums_are_made_in_rank_order_to_the_bit(ranks: RankPool, dtype: torch.dtype) -> None:
    for world in (1, 2, 3):
        expected = [sum((contribution(r, n, dtype) for r in range(1, world)), contribution(0, n, dtype)) for n in SIZES]
        for found in ranks(world, sums, dtype):
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
