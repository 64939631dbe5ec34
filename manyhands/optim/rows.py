"""Optimizers for the rows of `mh.Embedding` and `mh.EmbeddingBag`, and `step` for loops without us."""

from __future__ import annotations

from torch import nn

from manyhands.embedding.row_layer import Sparse
from manyhands.embedding.row_optimizers import FTRL, SGD, Adagrad, Adam, RowOptimizer, RowwiseAdagrad
from manyhands.errors import UsageError

__all__ = ["FTRL", "SGD", "Adagrad", "Adam", "RowOptimizer", "RowwiseAdagrad", "step"]


def step(model: nn.Module) -> None:
    """Apply the gradients that backward has left to the model's rows; several backwards add up.

    For a plain loop, beside `optimizer.step()`. A trainer and `hands.step()` do it themselves.

    Args:
        model: Any module with `mh.Embedding` or `mh.EmbeddingBag` in it.
    """
    sparse = Sparse(model)
    if not sparse:
        raise UsageError("The model has no layer with rows.", fix=["mh.Embedding(16, name=...)", "no mh.rows.step"])
    sparse.apply(1, sparse.take(), 1.0)
