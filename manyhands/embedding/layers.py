"""Embeddings for any 64-bit id, without a table size: the layers `Embedding` and `EmbeddingBag`.

Rows are created as ids appear, and updated by a row optimizer (`mh.optim.rows`), not by the model's. A trainer or
`mh.join` does that in every step; a plain loop calls `mh.optim.rows.step(model)`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from manyhands.embedding.row_layer import RowLayer
from manyhands.embedding.row_optimizers import Adagrad, Init, RowOptimizer, TableSpec
from manyhands.errors import DataError, SpecError

__all__ = ["Embedding", "EmbeddingBag"]

Combiner = Literal["sum", "mean", "max"]
_COMBINERS = ("sum", "mean", "max")


class Embedding(RowLayer):
    """A row of `dim` weights for each id: the output has one dimension more than the integer input.

    Rows are part of `state_dict()`, and of checkpoints.

    Args:
        dim: Weights per row.
        name: Name of the table; unique in the model, and part of checkpoints.
        optimizer: How rows are updated: one of `mh.optim.rows`. Default: `mh.optim.rows.Adagrad()`.
        init: Initial weights of a row: "uniform" (the default), "normal" or "zeros".
        scale: Bound of the uniform, or standard deviation of the normal distribution.
        admit_after: A row is created by the n-th step that has a gradient for its id; before that, and in
            evaluation, an id without a row has its initial weights. Above 1, ids that are seen once take no memory.
        keep_steps: Rows that no step has updated for this many steps are dropped. Default: never.
        max_bytes: Above this size the least recently updated rows are dropped. Default: no limit.
        cache: For workers on another host than the parameter servers: how many rows each worker caches, as far as the
            mode's `staleness` allows. Default: none.
        seed: Initial weights are a function of it, `name` and the id. Default: the run's seed.
    """

    def __init__(
        self,
        dim: int,
        *,
        name: str,
        optimizer: RowOptimizer | None = None,
        init: Init = "uniform",
        scale: float = 0.05,
        admit_after: int = 1,
        keep_steps: int | None = None,
        max_bytes: int | None = None,
        cache: int | None = None,
        seed: int | None = None,
    ) -> None:
        spec = TableSpec(
            name=name,
            dim=dim,
            optimizer=Adagrad() if optimizer is None else optimizer,
            init=init,
            scale=scale,
            admit_after=admit_after,
            keep_steps=keep_steps,
            max_bytes=max_bytes,
            cache=cache,
            seed=seed or 0,
        )
        super().__init__(spec, takes_seed=seed is None)

    @property
    def dim(self) -> int:
        return self.spec.dim

    def forward(self, ids: Tensor) -> Tensor:
        _check_ids(ids, self.spec.name)
        return self.rows_at(ids)

    def extra_repr(self) -> str:
        return f"{self.spec.dim}, name={self.spec.name!r}, optimizer={self.spec.optimizer}"


class EmbeddingBag(Embedding):
    """Combines the rows of several ids into one, by `combiner`.

    Bags are the rows of a 2-d input; or ranges of a flat input, whose starts are in `offsets`. An empty bag is zeros.

    Args:
        dim: Weights per row.
        name: Name of the table; unique in the model, and part of checkpoints.
        combiner: How rows are combined: their "sum" (the default), their "mean", or the largest of each weight ("max").
        padding: An id that belongs to no bag, in a 2-d input. Default: none.
        optimizer: How rows are updated: one of `mh.optim.rows`. Default: `mh.optim.rows.Adagrad()`.
        init: Initial weights of a row: "uniform" (the default), "normal" or "zeros".
        scale: Bound of the uniform, or standard deviation of the normal distribution.
        admit_after: A row is created by the n-th step that has a gradient for its id; before that, and in
            evaluation, an id without a row has its initial weights. Above 1, ids that are seen once take no memory.
        keep_steps: Rows that no step has updated for this many steps are dropped. Default: never.
        max_bytes: Above this size the least recently updated rows are dropped. Default: no limit.
        cache: For workers on another host than the parameter servers: how many rows each worker caches, as far as the
            mode's `staleness` allows. Default: none.
        seed: Initial weights are a function of it, `name` and the id. Default: the run's seed.
    """

    def __init__(
        self,
        dim: int,
        *,
        name: str,
        combiner: Combiner = "sum",
        padding: int | None = None,
        optimizer: RowOptimizer | None = None,
        init: Init = "uniform",
        scale: float = 0.05,
        admit_after: int = 1,
        keep_steps: int | None = None,
        max_bytes: int | None = None,
        cache: int | None = None,
        seed: int | None = None,
    ) -> None:
        if combiner not in _COMBINERS:
            raise SpecError(
                f"combiner is {combiner!r}.", where=f"table {name!r}", fix=[f'combiner="{one}"' for one in _COMBINERS]
            )
        super().__init__(
            dim,
            name=name,
            optimizer=optimizer,
            init=init,
            scale=scale,
            admit_after=admit_after,
            keep_steps=keep_steps,
            max_bytes=max_bytes,
            cache=cache,
            seed=seed,
        )
        self.combiner, self.padding = combiner, padding

    def forward(self, ids: Tensor, offsets: Tensor | None = None) -> Tensor:
        _check_ids(ids, self.spec.name)
        flat, offsets = self._bags(ids, offsets)
        rows, inverse = self.rows_of(flat)
        if not len(flat):  # torch's embedding_bag needs a row; the sum keeps the output connected to autograd
            return rows.new_zeros(len(offsets), self.dim) + rows.sum()
        return functional.embedding_bag(inverse, rows, offsets, mode=self.combiner)

    def _bags(self, ids: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
        """Flat ids, and where each bag begins."""
        if offsets is not None:
            if ids.dim() != 1 or offsets.dim() != 1:
                raise self._wrong_shape(ids, f"with offsets of shape {list(offsets.shape)}")
            return self._without_padding(ids, offsets)
        if ids.dim() != 2:
            raise self._wrong_shape(ids, "without offsets")
        starts = torch.arange(0, ids.numel(), ids.shape[1], device=ids.device) if ids.shape[1] else None
        if starts is None:
            return ids.reshape(-1), torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
        return self._without_padding(ids.reshape(-1), starts)

    def _without_padding(self, flat: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        if self.padding is None:
            return flat, offsets
        if len(offsets) and not 0 <= int(offsets.min()) <= int(offsets.max()) <= len(flat):
            raise self._wrong_shape(flat, f"and offsets from {int(offsets.min())} to {int(offsets.max())}")
        kept = flat != self.padding
        before = torch.cat([kept.new_zeros(1, dtype=torch.int64), kept.cumsum(0)])
        return flat[kept], before[offsets]

    def _wrong_shape(self, ids: Tensor, how: str) -> DataError:
        return DataError(
            f"Bags of table {self.spec.name!r} have ids of shape {list(ids.shape)} {how}.",
            fix=[
                "ids of shape [bags, largest number of ids in a bag], with padding=",
                "flat ids, and offsets with the start of each bag",
            ],
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, combiner={self.combiner!r}"


def _check_ids(ids: Tensor, table: str) -> None:
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        kind = str(ids.dtype) if isinstance(ids, Tensor) else type(ids).__name__
        raise DataError(
            f"The ids of table {table!r} are {kind}, not integers.", fix=["ids.long()", "a tensor of int64"]
        )
