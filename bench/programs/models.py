"""The models of the benchmarks, synthetic data for them, and a careful hand-written training loop.

Data is random and small enough to stay in memory: speed does not depend on its values. Where the loss matters, it is
text that comes with every Python.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.programs.workloads import WORKLOADS

__all__ = [
    "HEADS",
    "SEQUENCE",
    "VOCABULARY",
    "WIDTH",
    "HandLoop",
    "loss",
    "make_data",
    "make_model",
    "optimizer_of",
    "text",
]

NUM_ROWS = 4096
SEQUENCE, VOCABULARY, WIDTH, HEADS = 128, 1024, 384, 6
TEXT_BYTES, HELD_OUT = 4_000_000, 256


def make_model(workload: str) -> nn.Module:
    match workload:
        case "cnn":
            return _cnn()
        case "mlp":
            return _mlp(784, 512, 512, 10)
        case "mlp-1m":
            return _mlp(784, 768, 512, 10)
        case "mlp-10m" | "mlp-10m-16":
            return _mlp(784, 2048, 2048, 2048, 10)
        case "mlp-100m":
            return _mlp(784, 5600, 5600, 5600, 5600, 10)
        case "blocks":
            return nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(12)))
        case "small-tensors":
            return _many_small()
        case "2000-tensors":
            return Bottlenecks(1000)
        case "transformer" | "text":
            return Transformer(num_layers=5)
    raise ValueError(workload)


def make_data(workload: str, num_rows: int = NUM_ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    if workload == "text":
        return text()[0]
    if workload == "transformer":
        tokens = torch.randint(0, VOCABULARY, (num_rows, SEQUENCE + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    row = {"cnn": (1, 28, 28), "blocks": (1024,), "small-tensors": (64,), "2000-tensors": (64,)}.get(workload, (784,))
    x = torch.randn(num_rows, *row, generator=generator)
    return x, torch.randint(0, 10, (num_rows,), generator=generator)


def text() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Python's standard library in rows of `SEQUENCE` bytes, with the next byte of each: to train on, and held out."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    read = bytearray(b"".join(file.read_bytes() for file in files)[:TEXT_BYTES])
    rows = torch.frombuffer(read, dtype=torch.uint8)[: len(read) // (SEQUENCE + 1) * (SEQUENCE + 1)].long()
    rows = rows.view(-1, SEQUENCE + 1)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    x, y = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    return (x[HELD_OUT:], y[HELD_OUT:]), (x[:HELD_OUT], y[:HELD_OUT])


def optimizer_of(workload: str) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    if workload == "text":
        return lambda params: torch.optim.AdamW(params, lr=3e-4)
    if WORKLOADS[workload].optimizer == "AdamW":
        return lambda params: torch.optim.AdamW(params, lr=1e-4)
    return lambda params: torch.optim.SGD(params, lr=0.001, momentum=0.9)


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


class Bottlenecks(nn.Module):
    """Residual blocks 64 -> 4, 8, 16, 32 or 64 -> 64: two tensors each, of 1, 2, 4, 8 or 16 KB."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        widths = [4 << i % 5 for i in range(num_blocks)]
        self.down = nn.ModuleList(nn.Linear(64, width, bias=False) for width in widths)
        self.up = nn.ModuleList(nn.Linear(width, 64, bias=False) for width in widths)
        for param in self.up.parameters():
            param.data.mul_(0.05)  # so that activations stay small through a thousand of them

    def forward(self, x: Tensor) -> Tensor:
        for down, up in zip(self.down, self.up, strict=True):
            x = x + up(functional.relu(down(x)))
        return x[:, :10]


class Transformer(nn.Module):
    """Predicts the next token, with causal attention."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(SEQUENCE, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(SEQUENCE), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layers(self.tokens(x) + self.places, mask=self.mask, is_causal=True))
        return y


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    scores = model(x)
    return functional.cross_entropy(scores.flatten(0, -2), y.flatten())


class HandLoop:
    """A hand-written training loop: it indexes tensors directly, and reads the loss every step, as for a progress bar.

    `model` and `optimizer` may be wrapped by a library, which then also provides the backward call.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: tuple[Tensor, Tensor],
        batch: int,
        backward: Callable[[Tensor], object] = Tensor.backward,
    ) -> None:
        self._model, self._optimizer, self._batch, self._backward = model.train(), optimizer, batch, backward
        self._x, self._y = data
        self._order = torch.randperm(len(self._x))
        self._start = 0
        self.running_loss = 0.0

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            rows = self._next_rows()
            self._optimizer.zero_grad(set_to_none=True)
            value = loss(self._model, (self._x[rows], self._y[rows]))
            self._backward(value)
            self._optimizer.step()
            self.running_loss += value.item()

    def _next_rows(self) -> Tensor:
        if self._start + self._batch > len(self._order):
            self._order, self._start = torch.randperm(len(self._x)), 0
        rows = self._order[self._start : self._start + self._batch]
        self._start += self._batch
        return rows
