"""Optimizers for the rows of `mh.nn.Embedding` and `mh.nn.EmbeddingBag`, and `step` for plain PyTorch loops."""

from __future__ import annotations

from torch import nn

from manyhands.embedding.row_layer import Sparse
from manyhands.embedding.row_optimizers import FTRL, SGD, Adagrad, Adam, RowOptimizer, RowwiseAdagrad
from manyhands.errors import UsageError

__all__ = ["FTRL", "SGD", "Adagrad", "Adam", "RowOptimizer", "RowwiseAdagrad", "step"]


def step(model: nn.Module) -> None:
    """Apply the gradients of the last backward passes to the model's embedding rows; several passes add up.

    For a plain PyTorch loop, next to `optimizer.step()`. `mh.Trainer` and `hands.step()` do it already.

    Args:
        model: Any module that contains `mh.nn.Embedding` or `mh.nn.EmbeddingBag`.
    """
    sparse = Sparse(model)
    if not sparse:
        raise UsageError(
            "The model has no mh.nn.Embedding or mh.nn.EmbeddingBag.",
            fix=["mh.nn.Embedding(16, name=...)", "no mh.optim.rows.step"],
        )
    sparse.apply(1, sparse.take(), 1.0)
