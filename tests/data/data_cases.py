"""What the data tests share: workers simulated in one process, an exchange over threads, datasets to be spawned."""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from manyhands import images
from manyhands.data.batches import Batches, Step
from manyhands.data.feeds import BatchSchedule
from manyhands.data.sample_order import Position, SliceDivision, slices_of
from manyhands.data.sources.as_source import InputContext, as_source


def context(rank: int = 0, world_size: int = 1, slices: int = 1) -> InputContext:
    mine = tuple(slices_of(rank, world_size, slices))
    return InputContext(worker=rank, num_workers=world_size, slices=mine, num_slices=slices, host=rank)


def batches_of(
    data: Any, *, batch_size: int = 4, slices: int = 1, rank: int = 0, world_size: int = 1, **more: Any
) -> Batches:
    """`Batches` over any data; source settings (collate, num_workers) go with the rest."""
    exchange = more.get("exchange")
    settings = {name: more.pop(name) for name in ("collate", "num_workers", "batched", "order") if name in more}
    source = as_source(data, context=context(rank, world_size, slices), exchange=exchange, **settings)
    more.setdefault("position", Position(more.pop("seed", 0), 0, 0))
    if "steps" not in more:
        more.setdefault("epochs", 1)
    scheduled = {name: more.pop(name) for name in BatchSchedule._fields if name in more}
    schedule = BatchSchedule(batch_size, slices, **scheduled)
    return Batches(source, schedule, rank, SliceDivision(world_size), **more)


def pieces_by_slice(data: Any, **settings: Any) -> dict[tuple[int, int], Any]:
    """Every (step, slice) with its batch, as all workers together saw it."""
    found = {}
    for rank in range(settings.get("world_size", 1)):
        for step in batches_of(data, rank=rank, **settings):
            for piece in step.mine():
                found[step.number, piece.index] = piece.batch
    return found


def take_all(batches: Batches) -> list[Any]:
    return [piece.batch for step in batches for piece in step.mine()]


class Ledger:
    """Counts rows while simulated workers take steps together, and hands a position on."""

    def __init__(self, make_data: Callable[[], Any], **settings: Any) -> None:
        self._make_data, self._settings = make_data, settings
        self.position, self.next_step = Position(settings.get("seed", 0), 0, 0), 1
        self.rows: dict[int, list[int]] = {}

    def run(self, world_size: int, num_steps: int | None = None) -> None:
        workers = [self._worker(rank, world_size) for rank in range(world_size)]
        iterators = [iter(worker) for worker in workers]
        while num_steps is None or num_steps > 0:
            steps: list[Step | None] = [next(iterator, None) for iterator in iterators]
            if steps[0] is None:
                break
            for step in steps:
                assert step is not None
                taken = [int(row) for piece in step.mine() for row in piece.batch]
                self.rows.setdefault(step.epoch, []).extend(taken)
            self.position, self.next_step = steps[0].after, steps[0].number + 1
            num_steps = None if num_steps is None else num_steps - 1
        for worker in workers:
            worker.close()

    def _worker(self, rank: int, world_size: int) -> Batches:
        return batches_of(
            self._make_data(),
            rank=rank,
            world_size=world_size,
            position=self.position,
            first_step=self.next_step,
            **self._settings,
        )


class ThreadExchange:
    """An exchange between threads of one process; each call is a barrier, and names must agree."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size, timeout=60)
        self._slots: list[tuple[str, bytes]] = [("", b"")] * world_size
        self.calls: list[str] = []

    def of(self, rank: int) -> "RankExchange":
        return RankExchange(self, rank)

    def swap(self, rank: int, name: str, data: bytes) -> list[bytes]:
        self._slots[rank] = (name, data)
        self._barrier.wait()
        seen = list(self._slots)
        if rank == 0:
            self.calls.append(name)
        self._barrier.wait()
        assert {other for other, _ in seen} == {name}
        return [data for _, data in seen]


class RankExchange:
    def __init__(self, shared: ThreadExchange, rank: int) -> None:
        self._shared, self._rank = shared, rank

    def all_gather_bytes(self, name: str, data: bytes) -> list[bytes]:
        return self._shared.swap(self._rank, name, data)


def together(world_size: int, work: Callable[[int], Any]) -> list[Any]:
    """`work(rank)` in one thread per rank; the first error is raised."""
    with ThreadPoolExecutor(world_size) as pool:
        return [future.result() for future in [pool.submit(work, rank) for rank in range(world_size)]]


class Augmented(Dataset[Any]):
    """Draws from all three generators for every row."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, row: int) -> tuple[int, float, float, torch.Tensor]:
        return row, random.random(), float(np.random.rand()), torch.rand(2)


def augment(image: torch.Tensor, label: int) -> tuple[torch.Tensor, int]:
    """For `mh.Dataset.map`, in loader processes."""
    image = images.random_resized_crop(image, 8, scale=(0.5, 1.0))
    image = images.color_jitter(images.random_flip(image), 0.4, 0.4, 0.4, 0.1)
    return images.normalize(image, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)), label


class Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, row: int) -> int:
        if row == 7:
            raise ValueError("row 7 is torn")
        return row


class Endings(Dataset[Any]):
    """Ends its loader process at once."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> int:
        import os

        os._exit(3)


class Counting(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        yield from range(10)


def shuffled_numbers() -> Iterator[int]:
    """A stream that does its own shuffling, as many do."""
    numbers = list(range(23))
    random.shuffle(numbers)
    yield from numbers


if __name__ == "__main__":
    # Run by a test that kills this process: its loader process must end with it.
    import multiprocessing
    import time

    batches = batches_of(Augmented(), batch_size=2, num_workers=1)
    next(next(batches).mine())
    print(multiprocessing.active_children()[0].pid, flush=True)
    time.sleep(60)
