"""Gradient sums over real ranks, and the few bytes that travel with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import FileStore

from manyhands.comm.axis import connect
from manyhands.data.sample_order import slices_of
from manyhands.parallel.gradients.network_sum import GradientSum
from manyhands.testing import RankPool

MESSAGES = [bytes(range(256)), b"\xff" * 256, b"", b"short"]


def carry(store: str, dtype: torch.dtype, slices: int, world_size: int) -> list[tuple[list[bytes], torch.Tensor]]:
    """Three steps whose gradient in slice v is v + 1 everywhere; the second step's messages are the longest."""
    from manyhands.training.worker.worker import _current_session

    session, _ = _current_session.get()
    rank = session.identity.rank
    device = torch.device("cpu")
    axis = connect(FileStore(store, world_size), rank, world_size, address="127.0.0.1", device=device, timeout_s=60)
    params = [nn.Parameter(torch.zeros(5, dtype=dtype)), nn.Parameter(torch.zeros(2, 3, dtype=dtype))]
    summed = GradientSum(params, axis, bucket_bytes=16)
    shares = [slices_of(r, world_size, slices) for r in range(world_size)]
    found = []
    for step in range(3):
        message = MESSAGES[(rank + step) % len(MESSAGES)]
        summed.begin(slices, shares, f"step {step}")
        assert summed.can_carry(max(map(len, MESSAGES)))
        for v in shares[rank]:
            summed.before_backward(v)
            if v == shares[rank][-1]:
                summed.carry(message)
            sum(((v + 1) * param).sum() for param in params).backward()
            summed.after_backward(v)
        summed.finish()
        found.append((summed.carried(), torch.cat([param.grad.flatten() for param in params])))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("world_size", "slices"), [(2, 2), (2, 5), (3, 3), (3, 7)])
def test_every_byte_arrives_beside_the_sums(
    ranks: RankPool, tmp_path: Path, dtype: torch.dtype, world_size: int, slices: int
) -> None:
    for found in ranks(world_size, carry, str(tmp_path / "store"), dtype, slices, world_size):
        for step, (messages, total) in enumerate(found):
            sent = [MESSAGES[(rank + step) % len(MESSAGES)] for rank in range(world_size)]
            assert messages == [message.ljust(256, b"\0") for message in sent]
            assert total.tolist() == [slices * (slices + 1) / 2] * 11


def test_nothing_is_carried_where_a_rank_has_no_slice(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(3, carries, str(tmp_path / "store"), 2) == [False] * 3


def carries(store: str, slices: int) -> bool:
    from manyhands.training.worker.worker import _current_session

    session, _ = _current_session.get()
    identity, device = session.identity, torch.device("cpu")
    axis = connect(FileStore(store, 3), identity.rank, 3, address="127.0.0.1", device=device, timeout_s=60)
    summed = GradientSum([nn.Parameter(torch.zeros(5))], axis, bucket_bytes=16)
    summed.begin(slices, [slices_of(r, 3, slices) for r in range(3)], "step 1")
    return summed.can_carry(8)
