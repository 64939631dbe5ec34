"""Trainings for layouts that divide memory: layers large enough to be blocks, and what is special about some."""

from __future__ import annotations

import gc
import os
from typing import Any

import layout_cases
import torch
from layout_cases import CLASSES, FEATURES, LENGTH, WORDS, data_for, loss, right, saved_weights, weighted_loss
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import manyhands as mh
from manyhands.errors import ManyhandsError, Preempted
from tests.listeners import listeners_of
from tests.stopping import StopAt

WIDTH = 72
"""Does not divide by 3 workers evenly where rows are concerned: 72 classes of weights, but 8 of outputs."""


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.Dropout(0.2),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
        nn.Linear(WIDTH, CLASSES),
    )


def cnn() -> nn.Module:
    # The second convolution has a bias right before BatchNorm: its true gradient is 0, and AdamW turns any rounding
    # noise in it into full-size steps. A sum that is grouped by worker fails here.
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 24, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(24, 24, 3, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(384, CLASSES),
    )


class TiedTransformer(nn.Module):
    """Embedding and output layer are one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        self.position = nn.Parameter(torch.randn(LENGTH, 32) * 0.1)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 48, dropout=0.1, batch_first=True) for _ in range(5)
        )
        self.output = nn.Linear(32, WORDS, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words) + self.position
        for block in self.blocks:
            x = block(x)
        return self.output(x)


class Wide(nn.Module):
    """Blocks that are large enough to be gathered one by one when layers are split, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 64)
        self.blocks = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True),
                nn.Linear(64, 128),  # by columns: what it hands to the next is in parts
                nn.Linear(128, 64),
                nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True),
            ]
        )
        self.output = nn.Linear(64, WORDS, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.output(x)


class Peculiar(nn.Module):
    """Layers that few rows, or none, have to do with; one that is used twice; a large and a small frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.twice = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.seldom, self.never = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(2**14 + 1, WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) + self.table((x[:, 0].abs() * 1000).long())
        h = self.twice[0](torch.tanh(self.twice[0](h))) * self.scale
        if bool((x[:, 1] > 1.4).any()):  # some slices have such a row
            h = h + self.seldom(h)
        return self.last(h)


class Recurrent(nn.Module):
    """Returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.layers = nn.ModuleList([nn.LSTM(32, 32, batch_first=True), nn.Linear(32, WIDTH), nn.Linear(WIDTH, WORDS)])

    def forward(self, words: Tensor) -> dict[str, Tensor]:
        x, _ = self.layers[0](self.words(words))
        return {"scores": self.layers[2](self.layers[1](x).relu())}


OPTIMIZERS = {
    **layout_cases.OPTIMIZERS,
    "LBFGS": lambda params: torch.optim.LBFGS(params, max_iter=2),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "Adafactor": torch.optim.Adafactor,
}
MODELS = {
    "MLP": mlp,
    "CNN": cnn,
    "tied transformer": TiedTransformer,
    "wide": Wide,
    "peculiar": Peculiar,
    "recurrent": Recurrent,
}


def loss_of_two_passes(model: nn.Module, batch: Any) -> Tensor:
    """As twins are trained: one model, called twice."""
    x, y = batch
    return nn.functional.cross_entropy(model(x) - model(-x), y)


def loss_of_dict(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x)["scores"].flatten(0, -2), y.flatten())


def loss_with_penalty(model: nn.Module, batch: Any) -> Tensor:
    return 0.1 * sum(param.norm() for param in model.parameters()) + loss(model, batch)  # type: ignore[return-value]


LOSSES = {
    "penalty": loss_with_penalty,
    "mean": loss,
    "weighted": weighted_loss,
    "two passes": loss_of_two_passes,
    "dict": loss_of_dict,
}


class Watch:
    """What this worker's process holds in tensors after the last step, and who listens."""

    def __init__(self) -> None:
        self.num_bytes, self.listeners = 0, set[str]()

    def after_step(self, trainer: Any, step: int, stats: Any) -> None:
        self.num_bytes, self.listeners = tensor_bytes(), listeners_of({os.getpid()})


def tensor_bytes() -> int:
    """All memory that any tensor of this process lies in, counted once."""
    gc.collect()
    storages = {}
    for one in gc.get_objects():
        if type(one) in (Tensor, nn.Parameter):
            for tensor in (one, one.grad if one.is_leaf else None):
                if tensor is not None:
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def make_trainer(
    model: str, strategy: Any, optimizer: str = "AdamW", kind: str = "mean", **arguments: Any
) -> mh.Trainer:
    return mh.Trainer(
        model=MODELS[model],
        loss=LOSSES[kind],
        optimizer=OPTIMIZERS[optimizer],
        metrics={"right": right} if kind != "dict" else None,
        strategy=strategy,
        **{"slices": 4, **arguments},
    )


def train(
    model: str, strategy: Any, arguments: dict[str, Any] | None = None, fit: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train and evaluate: everything that should not depend on where memory is."""
    trainer = make_trainer(model, strategy, **(arguments or {}))
    data = data_for("tied transformer" if model in ("tied transformer", "wide", "recurrent") else "MLP")
    history = trainer.fit(data, **{"epochs": 1, "batch_size": 16, "validation": data, **(fit or {})})
    return results_of(trainer, data, history)


def watched(strategy: Any, model: str = "tied transformer") -> Watch:
    watch = Watch()
    trainer = make_trainer(model, strategy, hooks=[watch])
    trainer.fit(data_for("tied transformer"), steps=2, batch_size=16)
    return watch


def refused(strategy: Any, optimizer: str, kind: str = "mean") -> str:
    try:
        make_trainer("MLP", strategy, optimizer, kind).fit(data_for("MLP"), steps=1, batch_size=16)
    except ManyhandsError as error:
        return str(error)
    return ""


def results_of(trainer: mh.Trainer, data: tuple[Tensor, Tensor], history: mh.History) -> dict[str, Any]:
    return {
        "history": [dict(row) for row in history],
        "evaluation": trainer.evaluate(data, batch_size=15),
        "predictions": tree_leaves(trainer.predict(data[0], batch_size=15))[0].float().numpy(),
        "weights": saved_weights(trainer),
    }


def train_until(strategy: Any, folder: str | None, step: int | None) -> dict[str, Any]:
    """Ten steps, from the run's last checkpoint on; not further than `step`."""
    trainer = make_trainer("CNN", strategy, hooks=[StopAt(step)], run_dir=folder)
    try:
        history = trainer.fit(data_for("MLP"), steps=10, batch_size=10)
    except Preempted:
        return {"stopped": True}
    return {**results_of(trainer, data_for("MLP"), history), "stopped": False}


def edit_and_train(strategy: Any, folder: str) -> dict[str, Any]:
    """Change weights by hand, on the whole model, between two calls of `fit`; then save them, train on and go back."""
    trainer = make_trainer("MLP", strategy)
    trainer.fit(data_for("MLP"), steps=1, batch_size=16)
    with trainer.editing() as model:
        weight = model.get_submodule("2").weight
        assert isinstance(weight, Tensor)
        shape = tuple(weight.shape)
        weight[5:9] = torch.arange(4.0).view(4, 1) if trainer.is_chief else 0.0  # the chief's counts
    trainer.fit(data_for("MLP"), steps=1, batch_size=16)
    weights = saved_weights(trainer)
    trainer.save(f"{folder}/model.safetensors")
    trainer.fit(data_for("MLP"), steps=1, batch_size=16)
    trainer.load(f"{folder}/model.safetensors")
    return {"weights": weights, "shape": shape, "loaded": saved_weights(trainer)}


def own_loop(strategy: Any, slices: int = 4) -> float:
    torch.manual_seed(0)
    hands = mh.join(strategy=strategy, slices=slices, clip_norm=0.5)
    model = mlp()
    model, _ = hands.setup(model, OPTIMIZERS["AdamW"](model.parameters()))
    for batch in hands.batches(data_for("MLP"), batch_size=16, steps=3):
        hands.backward(loss(model, batch))
        hands.step()
    return hands.evaluate(data_for("MLP"), loss=loss, batch_size=15)["loss"]


def refused_loop(strategy: Any) -> str:
    try:
        own_loop(strategy, slices=3)
    except ManyhandsError as error:
        return str(error)
    return ""
