"""Trainings that every layout of a model must end alike: small ones of the kinds that people divide."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import manyhands as mh
from manyhands.parallel.tensor.sharded_tensor import ShardedTensor

FEATURES, CLASSES, WORDS, LENGTH = 16, 8, 24, 6


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 32),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(32, 32),
        nn.Tanh(),
        nn.Linear(32, 32),
        nn.ReLU(),
        nn.Linear(32, CLASSES),
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(128, CLASSES),
    )


class TiedTransformer(nn.Module):
    """Embedding and output layer are one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.position = nn.Parameter(torch.randn(LENGTH, 16) * 0.1)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True) for _ in range(4)
        )
        self.norm = nn.LayerNorm(16)
        self.output = nn.Linear(16, WORDS, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words) + self.position
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


class Noticing(nn.LayerNorm):
    """Knows whether it was given parts of a sequence in training."""

    seen: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            Noticing.seen = isinstance(x, ShardedTensor) and x.division.sequence
        return super().forward(x)


class UNet(nn.Module):
    """What goes down is added on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU())
        self.down2 = nn.Sequential(nn.Linear(32, 16), nn.ReLU())
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1))
        self.up2 = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
        self.up1 = nn.Linear(64, CLASSES)
        self.classes = CLASSES
        self.unused = nn.Linear(3, 3)  # belongs to the model, and to its checkpoints, all the same

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(one)
        up = self.up2(torch.cat([self.middle(two), two], 1))
        return self.up1(torch.cat([up, one], 1))


MODELS = {"MLP": mlp, "CNN": cnn, "tied transformer": TiedTransformer, "U-Net": UNet}


def data_for(model: str, rows: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    if model == "tied transformer":
        words = torch.randint(WORDS, (rows, LENGTH), generator=generator)
        return words, (words + words.roll(1, 1)) % WORDS
    x = torch.randn(rows, FEATURES, generator=generator)
    return x, (x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def weighted_loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    x, y = batch
    weights = (y.flatten() + 1).float()
    each = nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="none")
    return (each * weights).sum(), weights.sum()


def right(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return (model(x).argmax(-1) == y).float().flatten(1).mean(1) if y.dim() > 1 else (model(x).argmax(-1) == y).float()


def penalized_loss(model: nn.Module, batch: Any) -> Tensor:
    return loss(model, batch) + 0.1 * sum(param.norm() for param in model.parameters())  # type: ignore[operator]


OPTIMIZERS = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.003),
}


def make_trainer(
    model: str, strategy: Any, optimizer: str = "momentum", weighted: bool = False, **arguments: Any
) -> mh.Trainer:
    return mh.Trainer(
        model=MODELS[model],
        optimizer=OPTIMIZERS[optimizer],
        metrics={"right": right},
        strategy=strategy,
        **{"loss": weighted_loss if weighted else loss, "slices": 4, **arguments},
    )


def train(model: str, strategy: Any, fit: dict[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
    """Train and evaluate: everything that should not depend on the layout."""
    trainer = make_trainer(model, strategy, **arguments)
    data = data_for(model)
    history = trainer.fit(data, **{"epochs": 2, "batch_size": 16, **(fit or {})})
    return {
        "history": [dict(row) for row in history],
        "evaluation": trainer.evaluate(data, batch_size=12),
        "predictions": trainer.predict(data[0], batch_size=12).float().numpy(),
        "weights": saved_weights(trainer),
    }


def norms_get_parts(strategy: Any) -> bool | None:
    """Of a sequence, in a step of training."""

    def make() -> nn.Module:
        model = TiedTransformer()
        model.norm = Noticing(16)
        return model

    Noticing.seen = None
    trainer = mh.Trainer(make, loss, OPTIMIZERS["momentum"], strategy=strategy, slices=4)
    trainer.fit(data_for("tied transformer"), steps=1, batch_size=16)
    return Noticing.seen


def saved_weights(trainer: mh.Trainer) -> dict[str, Any]:
    """The whole model's, on the chief."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        trainer.save(path)
        return {name: one.numpy() for name, one in load_file(path).items()} if trainer.is_chief else {}


def attributes(model: nn.Module, batch: Any) -> Tensor:
    """1 for every row, if the model has what all ranks have, and refuses the rest with this line."""
    try:
        model.parameters()
        refused = False
    except mh.ManyhandsError as error:
        refused = "layout_cases.py" in str(error)
    return torch.full((len(batch[0]),), float(refused and model.classes == CLASSES and not model.training))


def evaluate_with_attributes(strategy: Any) -> dict[str, float]:
    metrics = {"attributes": attributes}
    trainer = mh.Trainer(UNet, loss, OPTIMIZERS["momentum"], metrics=metrics, strategy=strategy)
    return trainer.evaluate(data_for("U-Net"), batch_size=20)
