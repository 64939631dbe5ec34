"""Replicas that compute activations again: the same bits, dropout and batch statistics included, and less is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.testing import RankPool
from tests.training.workloads import OPTIMIZERS, data, mean_loss, weights_of


def tower() -> nn.Module:
    def stage() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3))

    return nn.Sequential(nn.Linear(12, 64), *(stage() for _ in range(6)), nn.Linear(64, 4))


KINDS: dict[str, Any] = {"mirrored": mh.Mirrored, "local_sgd": lambda **more: mh.LocalSGD(every=2, **more)}


def train(kind: str, recompute: str | None) -> tuple[dict[str, np.ndarray], int]:
    """Weights and statistics, and the bytes that the last forward pass has kept."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def loss(model: nn.Module, batch: Any) -> Tensor:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return mean_loss(model, batch)

    trainer = mh.Trainer(tower, loss, OPTIMIZERS["AdamW"], KINDS[kind](recompute=recompute), slices=4)
    trainer.fit(data(), epochs=1, batch_size=30)
    return weights_of(trainer), sum(kept.values())


@pytest.mark.parametrize("kind", ["mirrored", pytest.param("local_sgd", marks=pytest.mark.long)])
def test_replicas_that_compute_activations_again_have_the_same_bits_and_keep_less(ranks: RankPool, kind: str) -> None:
    plain, again = ranks(2, train, kind, None), ranks(2, train, kind, "blocks")
    for (weights, kept), (same, less) in zip(plain, again, strict=True):
        assert weights.keys() == same.keys()
        assert all(np.array_equal(weights[name], same[name]) for name in weights)
        assert less < 0.7 * kept
