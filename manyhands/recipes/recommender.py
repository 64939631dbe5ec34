"""Click prediction with a wide and deep model: a linear part that memorises, embeddings and a network for the rest.

`mh run -n 2 --recipe recommender` trains on synthetic data of known structure, and prints the AUC reached beside the
best possible one, by the true probabilities. With `-- --settings clicks.toml` it reads your files.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.errors import SpecError
from manyhands.recipes.recommender_data import Clicks, Features, RecommenderSettings, auc, load, make, read_settings

# Arbitrary odd factors that combine two ids into one.
LEFT, RIGHT = 0x9E3779B97F4A7C1, 0x2545F4914F6CDD1D


class WideAndDeep(nn.Module):
    """A weight for every category and cross, trained by FTRL, most exactly 0; and an embedding for every category."""

    def __init__(self, fields: list[str], num_numbers: int, settings: RecommenderSettings) -> None:
        super().__init__()
        self.wide = mh.nn.EmbeddingBag(
            1,
            name="wide",
            init="zeros",
            # The loss is a mean, so gradients are small, and the default beta of 1 would hardly change the weights.
            optimizer=mh.optim.rows.FTRL(lr=settings.wide_lr, l1=settings.wide_l1, beta=1e-3),
            admit_after=settings.admit_after,
            max_bytes=settings.max_bytes,
        )
        self.deep = mh.nn.Embedding(
            settings.dim,
            name="deep",
            scale=settings.scale,
            optimizer=mh.optim.rows.Adagrad(lr=settings.deep_lr),
            admit_after=settings.admit_after,
            max_bytes=settings.max_bytes,
        )
        self.crosses = [(_index(fields, left), _index(fields, right)) for left, right in settings.crosses]
        sizes = [len(fields) * settings.dim + num_numbers, *settings.hidden]
        layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.network = nn.Sequential(*layers, nn.Linear(sizes[-1], 1))

    def forward(self, features: Features) -> Tensor:
        ids, numbers = features
        crosses = [(ids[:, a] * LEFT + ids[:, b] * RIGHT)[:, None] for a, b in self.crosses]
        wide = self.wide(torch.cat([ids, *crosses], 1))
        deep = self.network(torch.cat([self.deep(ids).flatten(1), numbers], 1))
        found: Tensor = (wide + deep).squeeze(1)
        return found


def _index(fields: list[str], name: str) -> int:
    if name not in fields:
        raise SpecError(f"crosses has {name!r}; the categories are {', '.join(fields)}.", where="--settings")
    return fields.index(name)


def loss(model: nn.Module, batch: tuple[Features, Tensor]) -> Tensor:
    features, clicked = batch
    return nn.functional.binary_cross_entropy_with_logits(model(features), clicked)


def result_line(reached: float, ceiling: float | None) -> str:
    if ceiling is None:
        return f"held-out clicks: AUC {reached:.4f}"
    return f"held-out clicks: AUC {reached:.4f}; the true probabilities reach {ceiling:.4f}"


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Path, help="a TOML file: [data], and the model's sizes and rates")
    parser.add_argument("--rows", type=int, default=60_000, help="number of rows of synthetic data")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=256)
    return parser.parse_args(arguments)


def prepare(settings: RecommenderSettings, rows: int) -> tuple[RecommenderSettings, Clicks]:
    if settings.data is not None:
        return settings, load(settings.data)
    return msgspec.structs.replace(settings, crosses=settings.crosses or [("device", "hour")]), make(rows)


def main(arguments: Sequence[str] | None = None) -> tuple[float, float | None]:
    """The AUC that was reached, and its ceiling."""
    asked = options(arguments)
    settings, clicks = prepare(read_settings(asked.settings), asked.rows)
    num_numbers = clicks.training[0][1].shape[1]
    trainer = mh.Trainer(
        model=lambda: WideAndDeep(clicks.fields, num_numbers, settings),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=settings.lr),
        strategy="mirrored",
        slices=4,  # fixed, so that any number of workers gives the same model
    )
    trainer.fit(clicks.training, epochs=asked.epochs, batch_size=asked.batch_size, validation=clicks.held_out)
    reached = auc(trainer.predict(clicks.held_out, batch_size=4096), clicks.held_out[1])
    if trainer.is_chief:
        print(result_line(reached, clicks.ceiling))
    trainer.save(trainer.run_dir / "model.safetensors")
    return reached, clicks.ceiling


if __name__ == "__main__":
    main()
