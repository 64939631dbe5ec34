"""A small exact training in which one worker, after some step, has a wrong bit: in a weight, or in all gradients."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch
from printed_digest import print_digest
from torch import nn

import manyhands as mh

FAULTY_RANK = 1


def flip(tensor: torch.Tensor) -> None:
    ctypes.c_uint32.from_address(tensor.data_ptr() + 4 * (tensor.numel() // 2)).value ^= 1 << 9


def spoil(grad: torch.Tensor) -> torch.Tensor:
    grad = grad.clone()
    flip(grad)
    return grad


class Break:
    def __init__(self, fault: str, step: int) -> None:
        self._fault, self._step = fault, step

    def after_step(self, trainer: mh.Trainer, step: int, stats: Any) -> None:
        broken, weight = trainer.run_dir / "broken", trainer.model.get_parameter("0.weight")
        if self._fault == "none" or step != self._step or trainer._run.worker.rank != FAULTY_RANK:
            return
        if not broken.exists():  # a replacement, or a worker that starts again, is in order
            broken.touch()
            flip(weight) if self._fault == "weight" else weight.register_hook(spoil)


def main() -> None:
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(96, 10, generator=generator), torch.randint(0, 3, (96,), generator=generator)
    trainer = mh.Trainer(
        model=lambda: nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        slices=6,
        exact=True,
        hooks=[Break(sys.argv[1], int(sys.argv[2]))],
    )
    trainer.fit(data, steps=30, batch_size=24, checkpoint=mh.Checkpoints(every_steps=4))
    print_digest(trainer)


if __name__ == "__main__":
    main()
