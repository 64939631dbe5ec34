"""Handwritten digits: a small convolutional network on 1,797 pictures of 8 x 8.

Run it as `mh run -n 2 --recipe digits`. A fifth of the pictures is held out. `digits-licence.txt` says whose they are.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import manyhands as mh

Pictures = tuple[Tensor, Tensor]


def load() -> tuple[Pictures, Pictures]:
    """(training, held-out) images and their labels: always the same division."""
    with np.load(Path(__file__).with_suffix(".npz"), allow_pickle=False) as digits:
        pictures = torch.from_numpy(digits["pictures"]).float().unsqueeze(1) / 16.0
        labels = torch.from_numpy(digits["labels"]).long()
        kept, held_out = (torch.from_numpy(digits[name].astype(np.int64)) for name in ("training", "held_out"))
    return (pictures[kept], labels[kept]), (pictures[held_out], labels[held_out])


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def loss(model: nn.Module, batch: Pictures) -> Tensor:
    pictures, labels = batch
    return nn.functional.cross_entropy(model(pictures), labels)


def right(model: nn.Module, batch: Pictures) -> Tensor:
    pictures, labels = batch
    hits: Tensor = model(pictures).argmax(1) == labels
    return hits.float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()
    training, held_out = load()
    trainer = mh.Trainer(
        model=make_model,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=2e-3, weight_decay=1e-2),
        strategy="mirrored",
        metrics={"accuracy": right},
        slices=4,  # fixed, so that any number of workers gives the same network
    )
    trainer.fit(
        training,
        epochs=options.epochs,
        batch_size=64,
        validation=held_out,
        checkpoint=mh.Checkpoints(every_steps=50, keep_best="accuracy"),
    )
    results = trainer.evaluate(held_out)
    if trainer.is_chief:
        print(f"held-out digits: {results['accuracy']:.2%} correct, loss {results['loss']:.4f}")
    trainer.save(trainer.run_dir / "model.safetensors")


if __name__ == "__main__":
    main()
