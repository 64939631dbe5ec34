"""A training with divided parameters, one of whose workers is killed -9 in the middle, once."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from layout_cases import data_for, make_trainer

import manyhands as mh

STEPS = 10


class KilledAt:
    def __init__(self, step: int, mark: Path) -> None:
        self._step, self._mark = step, mark

    def before_step(self, trainer: Any, step: int) -> None:
        if step == self._step and not trainer.is_chief and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(strategy: Any, hooks: list[Any]) -> mh.Trainer:
    trainer = make_trainer("CNN", strategy, "AdamW", hooks=hooks)
    checkpoint = mh.Checkpoints(every_steps=4)
    trainer.fit(data_for("CNN"), steps=STEPS, batch_size=16, checkpoint=checkpoint)
    return trainer


if __name__ == "__main__":
    train(mh.Sharded(), [KilledAt(7, Path("killed"))]).save(sys.argv[1])
