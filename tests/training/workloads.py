"""Small trainings that tests run on real ranks. Results are plain arrays, so that they can be compared bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

import manyhands as mh

ROWS, FEATURES, CLASSES = 90, 12, 4


def data(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(rows, FEATURES, generator=generator)
    return x, (x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def with_dropout_and_batch_norm() -> nn.Module:
    # The first Linear has a bias right before BatchNorm: its true gradient is 0, and AdamW turns any rounding noise
    # in it into full-size steps. A sum that is grouped by worker fails here.
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, CLASSES)
    )


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48, CLASSES),
    )


MODELS = {"plain": plain, "dropout and BatchNorm": with_dropout_and_batch_norm, "convolutional": convolutional}


def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def weighted_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A mean over tokens that count: the weight is known only after the forward pass."""
    x, y = batch
    weights = (y + 1).float()
    return (nn.functional.cross_entropy(model(x), y, reduction="none") * weights).sum(), weights.sum()


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=4),
}


def accuracy(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).float()


def make_trainer(model: str = "plain", optimizer: str = "SGD", weighted: bool = False, **arguments: Any) -> mh.Trainer:
    return mh.Trainer(
        model=MODELS[model],
        loss=weighted_loss if weighted else mean_loss,
        optimizer=OPTIMIZERS[optimizer],
        metrics={"accuracy": accuracy},
        **arguments,
    )


def train(fit: dict[str, Any] | None = None, rows: int = ROWS, **arguments: Any) -> dict[str, Any]:
    """Train, evaluate and predict; everything that should not depend on the number of workers."""
    trainer = make_trainer(**arguments)
    x, y = data(rows)
    history = trainer.fit((x, y), **{"epochs": 2, "batch_size": 24, **(fit or {})})
    return {
        "weights": weights_of(trainer),
        "history": [dict(row) for row in history],
        "evaluation": trainer.evaluate((x, y), batch_size=17),
        "predictions": trainer.predict(x, batch_size=17).float().numpy(),
        "steps": trainer.step,
    }


def weights_of(trainer: mh.Trainer) -> dict[str, np.ndarray]:
    return {name: value.detach().cpu().numpy().copy() for name, value in trainer.model.state_dict().items()}
