"""The script under the faults of `recovery`: a model of 1 M parameters, steps of about 50 ms, and a log of all commits.

`python -m bench.recovery.recovery_script FOLDER STEPS [THINK_S]`. Every worker appends each committed step to its
file in FOLDER, with the monotonic clock that all processes of a host share, before it continues: a kill loses no
logged commit.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import manyhands as mh
from bench.programs.models import loss, make_data, make_model, optimizer_of

__all__ = ["BATCH", "MODEL", "SLICES", "THINK_S", "CommitLog", "thinking_loss"]

MODEL = "mlp-1m"
SLICES = 4
BATCH = 32 * SLICES
# Four busy workers on two cores would measure how the system divides cores; a model that sleeps shows recovery alone.
THINK_S = 0.04


class CommitLog:
    def __init__(self, folder: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._fd = os.open(folder / f"commits-{os.getpid()}", flags, 0o600)

    def write(self, step: int, generation: str) -> None:
        os.write(self._fd, f"{time.monotonic_ns()} {step} {generation}\n".encode())

    def after_step(self, trainer: Any, step: int, stats: Any) -> None:
        self.write(step, trainer._run.worker.group.generation)


def thinking_loss(model: nn.Module, batch: tuple[Tensor, Tensor], think_s: float = THINK_S) -> Tensor:
    time.sleep(think_s)
    return loss(model, batch)


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    think_s = float(sys.argv[3]) if len(sys.argv) > 3 else THINK_S
    torch.manual_seed(0)
    trainer = mh.Trainer(
        lambda: make_model(MODEL),
        functools.partial(thinking_loss, think_s=think_s),
        optimizer_of(MODEL),
        slices=SLICES,
        hooks=[CommitLog(folder)],
    )
    trainer.fit(make_data(MODEL), steps=steps, batch_size=BATCH, checkpoint=mh.Checkpoints(every_s=30))


if __name__ == "__main__":
    main()
