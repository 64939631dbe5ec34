"""Models of four kinds, each with inputs, whose graphs are tested."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from manyhands.parallel.pipeline.partition import Inputs

__all__ = ["Branching", "SmallCNN", "bert", "keras_model", "transformer"]


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))


class SmallCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Conv2d(3, 8, 3, padding=1), Residual(8), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(torch.relu(self.stem(x))).mean((2, 3)))


class Branching(nn.Module):
    """What it computes depends on values, which no trace has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if h.sum() > 0:
            h = h + 1
        return self.last(torch.cat([h.relu(), self.second(x)], 1))


def transformer() -> tuple[nn.Module, Inputs]:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.Sequential(nn.Embedding(50, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 50))
    return model, Inputs((torch.randint(50, (2, 12)),), {})


def bert() -> tuple[nn.Module, Inputs]:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=100, max_position_embeddings=32, **sizes))
    ids = torch.randint(100, (2, 12))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 1])}
    return model, Inputs((), batch)


def keras_model() -> tuple[Any, Inputs]:
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    seen = keras.Input((8, 8, 1))
    h = keras.layers.Conv2D(4, 3, padding="same", name="conv")(seen)
    h = keras.layers.Add(name="add")([h, keras.layers.Conv2D(4, 1, name="skip")(seen)])
    h = keras.layers.Dropout(0.1, name="drop")(keras.layers.GlobalAveragePooling2D(name="mean")(h))
    model = keras.Model(seen, keras.layers.Dense(3, name="out")(h))
    return model, Inputs((torch.randn(4, 8, 8, 1),), {"training": True})
