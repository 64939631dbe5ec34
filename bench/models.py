"""The models of the benchmarks, made-up data for them, and the loop that a careful person writes by hand.

Data is random and small enough to stay in memory: speed does not depend on its values.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["HandLoop", "loss", "make_data", "make_model", "make_optimizer"]

NUM_ROWS = 4096


def make_model(workload: str) -> nn.Module:
    match workload:
        case "cnn":
            return _cnn()
        case "mlp":
            return _mlp(784, 512, 512, 10)
        case "mlp-10m":
            return _mlp(784, 2048, 2048, 2048, 10)
        case "small-tensors":
            return _many_small()
    raise ValueError(workload)


def make_data(workload: str) -> tuple[Tensor, Tensor]:
    row = {"cnn": (1, 28, 28), "small-tensors": (64,)}.get(workload, (784,))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_ROWS, *row, generator=generator)
    return x, torch.randint(0, 10, (NUM_ROWS,), generator=generator)


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def _mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _many_small() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()) for _ in range(50)]
    return nn.Sequential(*blocks, nn.Linear(64, 10))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return functional.cross_entropy(model(x), y)


def make_optimizer(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.001, momentum=0.9)


class HandLoop:
    """A training loop by hand: tensors are indexed directly, and the loss is read every step, as for a progress bar."""

    def __init__(self, model: nn.Module, data: tuple[Tensor, Tensor], batch: int) -> None:
        self._model, self._batch = model.train(), batch
        self._x, self._y = data
        self._optimizer = make_optimizer(model.parameters())
        self._order = torch.randperm(len(self._x))
        self._start = 0
        self.running_loss = 0.0

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            rows = self._next_rows()
            x, y = self._x[rows], self._y[rows]
            self._optimizer.zero_grad(set_to_none=True)
            value = functional.cross_entropy(self._model(x), y)
            value.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self.running_loss += value.item()

    def _next_rows(self) -> Tensor:
        if self._start + self._batch > len(self._order):
            self._order, self._start = torch.randperm(len(self._x)), 0
        rows = self._order[self._start : self._start + self._batch]
        self._start += self._batch
        return rows
