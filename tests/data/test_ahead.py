"""Slices that are fetched ahead in any order: each is given once, and no others are kept than those that are wanted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyhands.data.batches import Batches
from manyhands.data.feeds import BatchSchedule
from manyhands.data.fetchers import SliceRequest
from manyhands.data.lease_prefetch import LeasePrefetch, how_far
from manyhands.data.sample_order import Position, SliceDivision
from manyhands.data.sources.as_source import as_source
from manyhands.errors import DataFetchFailed


def job(step: int, *rows: int) -> SliceRequest:
    return SliceRequest(step, 0, np.array(rows), 0)


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, row: int) -> tuple[int, float, int]:
        if row == 11:
            raise ValueError("row 11 is spoiled")
        return row, float(torch.rand(1)), os.getpid()


@pytest.fixture
def files(tmp_path: Path) -> str:
    np.save(tmp_path / "rows.npy", np.arange(20))
    return str(tmp_path / "*.npy")


@pytest.fixture
def ahead(files: str) -> Iterator[LeasePrefetch]:
    one = LeasePrefetch(as_source(files))
    yield one
    one.close()


def test_what_is_wanted_is_given_in_any_order_and_once(ahead: LeasePrefetch) -> None:
    ahead.want([job(1, 4, 5), job(2, 7), job(3, 0)])
    assert ahead.take(3, 0).tolist() == [0]
    assert ahead.take(1, 0).tolist() == [4, 5]
    assert [ahead.has(step, 0) for step in (1, 2, 3)] == [False, True, False]


def test_a_batch_leased_to_another_worker_is_dropped(ahead: LeasePrefetch) -> None:
    ahead.want([job(1, 4), job(2, 7)])
    ahead.want([job(2, 7), job(3, 0)])
    assert [ahead.has(step, 0) for step in (1, 2, 3)] == [False, True, True]
    ahead.want([job(1, 4)])
    assert ahead.take(1, 0).tolist() == [4], "it came back, and is fetched again"


def test_only_sources_that_can_be_read_ahead_ask_for_leases_ahead(files: str) -> None:
    assert how_far(as_source(torch.arange(9))) == 0, "rows in memory are copied by the step"
    assert how_far(as_source(Rows())) == 0, "user code runs where it may draw"
    assert how_far(as_source(files)) == 2
    assert [how_far(as_source(Rows(), num_workers=count)) for count in (1, 4)] == [2, 4]


@pytest.mark.slow
def test_loader_processes_give_what_the_caller_would_get() -> None:
    schedule = BatchSchedule(6, 2, Position(3, 0, 0), epochs=2, shuffle=False)
    here, away = (Batches(as_source(Rows(), num_workers=count), schedule, 0, SliceDivision(1)) for count in (0, 1))
    away.expect([(1, 0), (2, 0), (3, 0)], whole=True)
    for step, v in ((3, 1), (1, 0), (2, 0)):
        (rows, noise, by), (same_rows, same_noise, by_me) = (one.at(step).slice(v).batch for one in (away, here))
        assert (rows.tolist(), noise.tolist()) == (same_rows.tolist(), same_noise.tolist())
        assert os.getpid() in by_me and os.getpid() not in by
    assert os.getpid() in away.at(1).slice(0).batch[2], "it was leased before, and is not in the promised ones"
    with pytest.raises(DataFetchFailed, match="row 11 is spoiled"):
        away.at(2).slice(1)
    away.close()
