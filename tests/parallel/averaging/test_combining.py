"""Rows of real ranks, put together over real sockets, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from manyhands.comm.codecs import Bf16
from manyhands.parallel.averaging.averaging_rules import mean, median
from manyhands.parallel.averaging.combine_ranks import Combination, exchange_in_pair, to_first_rank
from manyhands.testing import RankPool
from manyhands.training.enter_run import enter

LENGTH = 103


def row_of(rank: int) -> torch.Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(rank))


def put_together(piece_bytes: int) -> dict[str, Any]:
    axis = enter("mirrored", {}).network
    found: dict[str, Any] = {}
    for name, rule, codec in (("mean", mean, None), ("median", median, None), ("bf16", mean, Bf16())):
        one = Combination(row_of(axis.rank), axis, rule, codec, name, piece_bytes)
        one.begin()
        one.advance()
        found[name] = one.finish().numpy()
    partner = {0: 2, 2: 0}.get(axis.rank)
    found["pair"] = exchange_in_pair(row_of(axis.rank), axis, partner, "pair").numpy()
    found["bytes"] = to_first_rank(bytes([axis.rank]) * 50 * axis.rank, axis, "bytes", piece_bytes)
    return found


@pytest.mark.parametrize("piece_bytes", [64, 2**20], ids=["in pieces", "at once"])
def test_rows_come_together_on_every_rank(ranks: RankPool, piece_bytes: int) -> None:
    results = ranks(3, put_together, piece_bytes)
    rows = np.stack([row_of(rank).numpy() for rank in range(3)])
    for rank, found in enumerate(results):
        np.testing.assert_allclose(found["mean"], rows.mean(axis=0), atol=1e-6)
        np.testing.assert_array_equal(found["median"], np.median(rows, axis=0))
        np.testing.assert_allclose(found["bf16"], rows.mean(axis=0), atol=0.02)
        assert found["bf16"].tobytes() == results[0]["bf16"].tobytes()
        np.testing.assert_array_equal(found["pair"], rows[{0: 2, 1: 1, 2: 0}[rank]])
        assert found["bytes"] == ([b"", b"\x01" * 50, b"\x02" * 100] if rank == 0 else [])
