"""Values of any size and form between real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore

from manyhands.comm.axis import Axis, connect
from manyhands.comm.point_to_point import FIRST_BYTES, PointToPoint
from manyhands.errors import UsageError
from manyhands.testing import RankPool

SIZES = (0, 1, FIRST_BYTES - 300, FIRST_BYTES - 8, FIRST_BYTES, 5 * FIRST_BYTES + 3)


def value(rank: int, size: int) -> Any:
    data = torch.arange(size, dtype=torch.int64).add(rank).to(torch.uint8)
    rest = (rank, None, [torch.full((2, 3), 0.5).bfloat16(), 0.25], torch.tensor(True))
    return {"data": data, "rest": rest, "name": "text"}


def exchange(store: str) -> list[Any]:
    """Both send all, before either receives any; received in another order than sent, some of it expected before."""
    from manyhands.training.worker.worker import _current_session

    session, _ = _current_session.get()
    rank = session.identity.rank
    device = torch.device("cpu")
    values = PointToPoint(connect(FileStore(store, 2), rank, 2, address="127.0.0.1", device=device, timeout_s=60))
    for tag, size in enumerate(SIZES):
        values.send(value(rank, size), 1 - rank, tag, f"value {tag}")
    values.expect(1 - rank, 3, "value 3")
    found = {tag: values.receive(1 - rank, tag, f"value {tag}") for tag in (5, 1, 0, 3, 2, 4)}
    values.flush()
    return [found[tag] for tag in range(len(SIZES))]


def test_values_of_any_size_arrive_as_they_were_sent(ranks: RankPool, tmp_path: Path) -> None:
    for rank, found in enumerate(ranks(2, exchange, str(tmp_path / "store"))):
        for size, got in zip(SIZES, found, strict=True):
            sent = value(1 - rank, size)
            assert got.pop("name") == sent.pop("name")
            torch.testing.assert_close(got, sent, rtol=0, atol=0)


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(UsageError, match=r"F0 of step 1\['mask'\] is a object"):
        PointToPoint(Axis(0, 1)).send({"mask": object()}, 0, 0, "F0 of step 1")
