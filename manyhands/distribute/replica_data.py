"""Data of a custom loop: global batches of which each replica takes its rows, or data that each replica makes.

Every worker reads every global batch, in the same order, and takes its part: rows r * B // n to (r + 1) * B // n. The
generators that data is shuffled with have their own state, which the model's dropout does not move, and each batch is
compared over the workers: data that differs is an error, not a wrong result. Start reading at `GlobalBatches`.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

import manyhands as mh
from manyhands.distribute.replica_exchange import ReplicaExchange
from manyhands.errors import DataError
from manyhands.torch_private import pytree

__all__ = ["DataRandomness", "GlobalBatches", "OwnBatches"]

_END = object()


class DataRandomness:
    """The state of Python's, numpy's and torch's generators while data is fetched, the same on every worker."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        generator = np.random.RandomState(seed & 0xFFFFFFFF)
        self._state: Any = (
            random.Random(seed).getstate(),
            generator.get_state(),
            torch.Generator().manual_seed(seed).get_state(),
        )

    @contextmanager
    def used(self) -> Iterator[None]:
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._set(self._state)
        try:
            yield
        finally:
            self._state = random.getstate(), np.random.get_state(), torch.get_rng_state()
            self._set(before)

    @staticmethod
    def _set(state: Any) -> None:
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.set_rng_state(state[2])


class _Passes:
    """A dataset, each pass over which is another epoch: a chain of ours shows the first one, unless it is told."""

    def __init__(self, dataset: Iterable[Any]) -> None:
        self.dataset, self._begun = dataset, 0

    def begin(self, seed: int) -> Iterator[Any]:
        self._begun += 1
        if isinstance(self.dataset, mh.Dataset):
            return self.dataset.values(epoch=self._begun - 1, seed=seed)
        return iter(self.dataset)


class GlobalBatches:
    """A dataset of global batches; iterating yields this replica's rows of each. One pass after the other."""

    def __init__(
        self, dataset: Iterable[Any], exchange: Callable[[], ReplicaExchange], randomness: Callable[[], DataRandomness]
    ) -> None:
        if isinstance(dataset, tuple | dict | Tensor | np.ndarray) or not hasattr(dataset, "__iter__"):
            raise DataError(
                f"A dataset yields global batches, and this is a {type(dataset).__name__}.",
                where="experimental_distribute_dataset",
                fix=["torch.utils.data.DataLoader(dataset, batch_size=GLOBAL_BATCH)"],
            )
        self._dataset, self._exchange, self._randomness = _Passes(dataset), exchange, randomness

    def __len__(self) -> int:
        return len(self._dataset.dataset)  # type: ignore[arg-type]  # as the dataset says

    def __iter__(self) -> Iterator[Any]:
        exchange = self._exchange()
        randomness = self._randomness()
        with randomness.used():
            batches = self._dataset.begin(randomness.seed)
        while True:
            with randomness.used():
                batch = next(batches, _END)
            rows = -1 if batch is _END else _rows(batch)
            _check_same(exchange, rows, batch)
            if batch is _END:
                return
            if rows < exchange.size:
                raise DataError(
                    f"A batch of {rows} rows is for {exchange.size} replicas: some would have none, and a mean over no "
                    "rows is not a number.",
                    where="experimental_distribute_dataset",
                    fix=["drop_last=True, or drop_remainder=True", "a batch of more rows"],
                )
            low, high = (number * rows // exchange.size for number in (exchange.rank, exchange.rank + 1))
            yield pytree.tree_map(lambda one, low=low, high=high: one[low:high], batch)


def _rows(batch: Any) -> int:
    """The rows of a batch, which each of its tensors has."""
    leaves = pytree.tree_leaves(batch)
    found = {len(one) if hasattr(one, "__len__") and np.ndim(one) else -1 for one in leaves}
    if len(found) != 1 or -1 in found:
        raise DataError(
            f"The tensors of a batch have no common number of rows: {sorted(found)}.",
            where="experimental_distribute_dataset",
            fix=["tensors and arrays whose first dimension is the batch"],
        )
    return int(found.pop())


def _check_same(exchange: ReplicaExchange, rows: int, batch: Any) -> None:
    """`DataError` unless all workers have the same batch: its number of rows, and its first and last row."""
    if exchange.size == 1:
        return
    digest = 0
    if rows > 0:
        for leaf in pytree.tree_leaves(batch):
            for row in (leaf[0], leaf[-1]):
                digest = zlib.crc32(np.ascontiguousarray(torch.as_tensor(row).cpu().numpy()).tobytes(), digest)
    found = exchange.gather(torch.tensor([rows, digest]))
    if any(not torch.equal(one, found[0]) for one in found):
        shown = ", ".join("the end" if int(one[0]) < 0 else f"{int(one[0])} rows" for one in found)
        alike = len({int(one[0]) for one in found}) == 1
        raise DataError(
            f"The workers read different batches: {shown}{', of different values' if alike else ''}.",
            where="experimental_distribute_dataset",
            fix=[
                "data in the same order on every worker",
                "distribute_datasets_from_function, for data of each worker",
            ],
        )


class OwnBatches:
    """Batches that each replica makes for itself, as they are; all replicas must make as many."""

    def __init__(self, dataset: Iterable[Any], exchange: Callable[[], ReplicaExchange]) -> None:
        self._dataset, self._exchange = _Passes(dataset), exchange

    def __iter__(self) -> Iterator[Any]:
        exchange, batches, count = self._exchange(), self._dataset.begin(torch.initial_seed()), 0
        while True:
            batch = next(batches, _END)
            ended = [bool(one) for one in exchange.gather(torch.tensor([batch is _END]))]
            if all(ended):
                return
            if any(ended):
                ranks = ", ".join(str(rank) for rank, one in enumerate(ended) if one)
                raise DataError(
                    f"After {count} batches the data of replicas {ranks} has ended, and that of others has not.",
                    where="distribute_datasets_from_function",
                    fix=["as many batches on every replica", "data that repeats, and a number of steps"],
                )
            count += 1
            yield batch
