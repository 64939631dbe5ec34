"""A training under a layout that is named, some of whose workers, or hosts, are killed -9 in the middle, once."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from layout_cases import data_for, make_trainer

import manyhands as mh

STEPS, KILLED_AT = 10, 7
LAYOUTS = {
    "sharded": mh.Sharded(workers=2),
    "tensor": mh.Tensor(2),
    "pipeline": mh.Pipeline(2, schedule="zero_bubble"),
    "mesh": mh.Mesh(data=2, pipeline=2),
    "sharded mesh": mh.Mesh(data=2, tensor=2, sharded=True),
    "data and tensor": mh.Mesh(data=2, tensor=2),
}


class KilledAt:
    """A rank, as it was at first, dies before a step begins; or the agent of its host."""

    def __init__(self, step: int, rank: int, mark: Path, *, host: bool = False) -> None:
        self._step, self._rank, self._mark, self._host = step, rank, mark, host

    def before_step(self, trainer: Any, step: int) -> None:
        if step == self._step and os.environ.get("RANK") == str(self._rank) and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getppid() if self._host else os.getpid(), signal.SIGKILL)


def train(strategy: Any, hooks: list[Any]) -> mh.Trainer:
    trainer = make_trainer("CNN", strategy, "AdamW", hooks=hooks)
    checkpoint = mh.Checkpoints(every_steps=4)
    trainer.fit(data_for("CNN"), steps=STEPS, batch_size=16, checkpoint=checkpoint)
    return trainer


if __name__ == "__main__":
    name, file, *victims = sys.argv[1:]
    last = str((LAYOUTS[name].workers or 1) - 1)
    killed = [
        KilledAt(KILLED_AT, int(one.removeprefix("host of ")), Path(f"killed {one}"), host=one.startswith("host"))
        for one in victims or [last]
    ]
    train(LAYOUTS[name], killed).save(file)
