"""Ranks that call different collectives at the same time get an error, and do not mix up their values."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed import FileStore

from manyhands.comm.axis import connect
from manyhands.errors import TrainingFailed
from manyhands.testing import RankPool


def call_in_different_names(store: str) -> str:
    from manyhands.training.worker.worker import _current_session

    rank = _current_session.get()[0].identity.rank
    device = torch.device("cpu")
    axis = connect(FileStore(store, 3), rank, 3, address="127.0.0.1", device=device, timeout_s=60)
    assert axis.all_gather_bytes("the same", b"x" * rank) == [b"", b"x", b"xx"]
    try:
        axis.all_gather_bytes("reduce" if rank == 1 else "mean", b"some data")
    except TrainingFailed as failed:
        return str(failed)
    return "nothing was said"


def test_ranks_that_call_different_collectives_get_an_error_that_names_each(ranks: RankPool, tmp_path: Path) -> None:
    for error in ranks(3, call_in_different_names, str(tmp_path / "store")):
        assert error.startswith(
            "Ranks called different collectives at the same time: rank 0 'mean', rank 1 'reduce'"
        ), error
