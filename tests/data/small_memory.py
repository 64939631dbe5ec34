"""Run in a mount namespace where /dev/shm is as small as Docker's default: what becomes of large batches."""

import sys
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from manyhands.data.batches import Batches
from manyhands.data.feeds import BatchSchedule
from manyhands.data.fetchers import SliceRequest
from manyhands.data.lease_prefetch import LeasePrefetch
from manyhands.data.sample_order import Position, SliceDivision
from manyhands.data.sources.as_source import as_source
from manyhands.errors import DataFetchFailed
from manyhands.launcher.machine_check import shared_memory


class Large(Dataset[Any]):
    def __len__(self) -> int:
        return 80

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.full((250_000,), float(row))


def collate(rows: list[torch.Tensor]) -> torch.Tensor:
    """A user's `collate_fn`: torch's would allocate shared memory, and its failure would be reported."""
    return torch.cat([row[None] for row in rows])


def fetch() -> None:
    source = as_source(Large(), collate=collate, num_workers=1)
    for step in Batches(source, BatchSchedule(80, 1, Position(0, 0, 0), epochs=1), 0, SliceDivision(1)):
        list(step.mine())


def fetch_ahead() -> None:
    ahead = LeasePrefetch(as_source(Large(), collate=collate, num_workers=1))
    try:
        ahead.want([SliceRequest(1, 0, np.arange(80), 0)])
        ahead.take(1, 0)
    finally:
        ahead.close()


if __name__ == "__main__":
    try:
        {"loader": fetch, "ahead": fetch_ahead}[sys.argv[1]]()
    except DataFetchFailed as error:
        found = shared_memory()
        print(error.what.splitlines()[0], error.fix[0], found.verdict, found.text, sep="\n")
