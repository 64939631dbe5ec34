"""Which settings of a torch DataLoader are used, ignored without effect, ignored with a warning, or refused.

A plain DataLoader provides its dataset, `collate_fn`, `num_workers`, `timeout`, `batch_size`, and its sampler's order,
if that is a function of (seed, epoch, position). One that makes batches in its own way can only be read as it is: a
stream of batches, with `batched=True`. Start reading at `refuse_own_batches`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

from manyhands.data.custom_orders import Order, Weighted
from manyhands.data.sources.row_source import Collate
from manyhands.errors import DataError

__all__ = ["LoaderBatches", "order_of", "own_collate", "refuse_own_batches", "warn_of_unused"]

# What a subclass can override that changes the batches of a DataLoader.
_MAKES_BATCHES = ("__iter__", "_get_iterator", "_index_sampler", "_auto_collation")
_USUAL_PREFETCH = 2
_AS_IT_IS = (
    "batched=True, and no batch_size: each batch of the loader is one global batch, of which workers take slices"
)


def refuse_own_batches(loader: DataLoader[Any]) -> None:
    """`DataError` unless the loader's batches are `batch_size` examples of its dataset in its sampler's order."""
    own = [name for name in _MAKES_BATCHES if getattr(type(loader), name) is not getattr(DataLoader, name)]
    if own:
        raise DataError(
            f"This DataLoader is a {type(loader).__name__} with its own {own[0]}, so its batches are not known.",
            fix=[_AS_IT_IS, "fit(loader.dataset, batch_size=..., collate=...), without the loader"],
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        which = "batch_size=None" if loader.batch_sampler is None else "a batch_sampler"
        raise DataError(
            f"This DataLoader makes its batches itself ({which}).",
            fix=[
                _AS_IT_IS,
                "fit(loader.dataset, batch_size=..., collate=...)",
                "order=mh.order.ByLength(lengths), for batches of similar length",
            ],
        )


def own_collate(loader: DataLoader[Any]) -> Collate | None:
    """The user's collate function; None for torch's default."""
    collate: Collate = loader.collate_fn
    return None if collate in (default_collate, default_convert) else collate


def order_of(loader: DataLoader[Any], num_rows: int) -> tuple[bool, Order | None]:
    """Whether the sampler shuffles, and its order if it is not a plain one. `DataError` for an unknown sampler."""
    sampler = loader.sampler
    if isinstance(sampler, SequentialSampler | RandomSampler) and len(sampler.data_source) != num_rows:
        raise _own_sampler(sampler)
    if type(sampler) is SequentialSampler:
        return False, None
    if type(sampler) is RandomSampler and sampler.replacement:
        return True, Weighted(np.ones(num_rows), sampler.num_samples)
    if type(sampler) is RandomSampler and sampler.num_samples <= num_rows:
        drawn = sampler.num_samples
        return True, None if drawn == num_rows else Weighted(np.ones(num_rows), drawn, replacement=False)
    if type(sampler) is WeightedRandomSampler:
        order = Weighted(sampler.weights, sampler.num_samples, sampler.replacement)
        order.check(num_rows)
        return True, order
    raise _own_sampler(sampler)


def _own_sampler(sampler: object) -> DataError:
    name = type(sampler).__name__
    fix = ["DataLoader(dataset, shuffle=True)", "torch.utils.data.Subset(dataset, rows) to choose rows", _AS_IT_IS]
    if isinstance(sampler, DistributedSampler):
        fix = ["DataLoader(dataset, shuffle=True), the same on every worker: workers get different slices of a batch"]
    return DataError(
        f"This DataLoader has its own sampler ({name}). Here the order is a function of (seed, epoch, position), "
        "so that no row is lost or used twice when workers join, die or resume.",
        fix=fix,
    )


def warn_of_unused(loader: DataLoader[Any]) -> None:
    """Warn of settings that have no effect here. Others that are not used, such as pin_memory, change no result."""
    if loader.drop_last:
        _warn("drop_last=True is ignored: a short last batch is used, so that no row is lost.")
    if loader.generator is not None or getattr(loader.sampler, "generator", None) is not None:
        _warn("generator is not used: the order is a function of the run's seed. Set seed= instead.")
    if loader.worker_init_fn is not None:
        _warn(
            "worker_init_fn is not called: randomness is set for every slice. Open files in the dataset's __getitem__."
        )
    if loader.num_workers and loader.prefetch_factor not in (None, _USUAL_PREFETCH):
        _warn(f"prefetch_factor={loader.prefetch_factor} is not used: slices of two steps are fetched ahead.")
    context = loader.multiprocessing_context
    if loader.num_workers and context is not None and context.get_start_method() != "spawn":
        _warn(f"multiprocessing_context {context.get_start_method()} is not used: loader processes are spawned.")


def _warn(text: str) -> None:
    warnings.warn(f"From the DataLoader, {text}", stacklevel=7)


class LoaderBatches:
    """A DataLoader as it is, read in this process: once per epoch, and the same each time that an epoch is read.

    Its samplers' draws are seeded when it is opened, including draws from a sampler's own generator.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        if isinstance(loader.sampler, DistributedSampler):
            raise _own_sampler(loader.sampler)
        if loader.num_workers:
            _warn(f"num_workers={loader.num_workers} is not used: with batched=True it is read in the worker itself.")
        if loader.worker_init_fn is not None:
            _warn("worker_init_fn is not called: with batched=True it is read in the worker itself.")
        self._loader = copy.copy(loader)
        self._loader.num_workers, self._loader.timeout = 0, 0
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        for one in self._parts():
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        for one in self._parts():
            generator = getattr(one, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        return iter(self._loader)

    def _parts(self) -> list[Any]:
        batch_sampler = self._loader.batch_sampler
        found = [self._loader, self._loader.dataset, self._loader.sampler, batch_sampler]
        return [*found, getattr(batch_sampler, "sampler", None)]
