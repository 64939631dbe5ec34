"""A training in which the worker of slot 1 is slow: prints the weights' digest, so that runs can be compared."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from printed_digest import print_digest
from torch import nn

import manyhands as mh

SLICE_S = 0.012 if os.environ.get("MANYHANDS_SLOT") == "1" else 0.002


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    time.sleep(SLICE_S)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def main() -> None:
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(96, 10, generator=generator), torch.randint(0, 3, (96,), generator=generator)
    trainer = mh.Trainer(
        model=lambda: nn.Sequential(
            nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3)
        ),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        slices=12,
        exact=True,
    )
    trainer.fit(data, steps=int(sys.argv[1]), batch_size=48)
    print_digest(trainer)


if __name__ == "__main__":
    main()
