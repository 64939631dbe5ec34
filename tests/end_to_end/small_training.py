"""A training that takes a second: prints the weights' digest, so that runs can be compared bit by bit."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from printed_digest import print_digest
from torch import nn

import manyhands as mh


class Slow:
    """Makes steps take `pause_s`, so that a test has time to interfere."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s

    def before_step(self, trainer: Any, step: int) -> None:
        time.sleep(self._pause_s)


class Held:
    """Waits before `step` until the file is gone, or the run is to stop: until then the run cannot have ended."""

    def __init__(self, step: int, file: Path) -> None:
        self._step, self._file = step, file

    def before_step(self, trainer: Any, step: int) -> None:
        session = trainer._run.worker.session
        while step == self._step and self._file.exists() and session.stop_requested is None:
            time.sleep(0.01)


class Rows(torch.utils.data.Dataset[Any]):
    """Data that has to be fetched row by row, so that loader processes have something to do."""

    def __init__(self, *columns: torch.Tensor) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, row: int) -> tuple[torch.Tensor, ...]:
        return tuple(column[row] for column in self._columns)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="mirrored")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--hold", type=int, default=0)
    parser.add_argument("--while-there", type=Path, default=Path())
    parser.add_argument("--every-steps", type=int, default=5)
    parser.add_argument("--loaders", type=int, default=0)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(96, 10, generator=generator), torch.randint(0, 3, (96,), generator=generator)
    trainer = mh.Trainer(
        model=lambda: nn.Sequential(
            nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3)
        ),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        strategy=options.strategy or None,
        slices=4,
        exact=True,
        hooks=[Slow(options.pause), Held(options.hold, options.while_there)],
    )
    checkpoint = mh.Checkpoints(every_steps=options.every_steps)
    source = Rows(*data) if options.loaders else data
    trainer.fit(source, steps=options.steps, batch_size=24, checkpoint=checkpoint, num_workers=options.loaders)
    print_digest(trainer)


if __name__ == "__main__":
    main()
