"""A training under a layout that is named, one of whose workers is killed -9 in the middle, once."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from layout_cases import data_for, make_trainer

import manyhands as mh

STEPS = 10
LAYOUTS = {
    "sharded": mh.Sharded(workers=2),
    "tensor": mh.Tensor(2),
    "pipeline": mh.Pipeline(2, schedule="zero_bubble"),
    "mesh": mh.Mesh(data=2, pipeline=2),
    "sharded mesh": mh.Mesh(data=2, tensor=2, sharded=True),
}


class KilledAt:
    """The last rank dies before a step begins."""

    def __init__(self, step: int, rank: int, mark: Path) -> None:
        self._step, self._rank, self._mark = step, rank, mark

    def before_step(self, trainer: Any, step: int) -> None:
        if step == self._step and os.environ.get("RANK") == str(self._rank) and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(strategy: Any, hooks: list[Any]) -> mh.Trainer:
    trainer = make_trainer("CNN", strategy, "AdamW", hooks=hooks)
    checkpoint = mh.Checkpoints(every_steps=4)
    trainer.fit(data_for("CNN"), steps=STEPS, batch_size=16, checkpoint=checkpoint)
    return trainer


if __name__ == "__main__":
    chosen = LAYOUTS[sys.argv[1]]
    workers = chosen.workers or 1
    train(chosen, [KilledAt(7, workers - 1, Path("killed"))]).save(sys.argv[2])
