"""A training under a layout that is named, some of whose workers, or hosts, are killed -9 in the middle, once.

Victims are ranks as they were at first: "3", "host of 2", or "3 in evaluation"; "scaled to 2" has replicas leave.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from layout_cases import data_for, make_trainer
from torch.utils.data import Dataset

import manyhands as mh
from manyhands.comm.point_to_point import FollowingMessages
from manyhands.comm.shared_memory_messages import SharedMemoryPointToPoint
from manyhands.control.session.run_client import request_scale
from manyhands.native import why_not

STEPS, KILLED_AT = 10, 7
IN_EVALUATION, SCALED = " in evaluation", "scaled to "
LAYOUTS = {
    "sharded": mh.Sharded(workers=2),
    "tensor": mh.TensorParallel(2),
    "pipeline": mh.PipelineParallel(2, schedule="zero_bubble"),
    "mesh": mh.Mesh(data=2, pipeline=2),
    "data and tensor": mh.Mesh(data=2, tensor=2),
    "sharded mesh": mh.Mesh(data=2, tensor=2, sharded=True),
}


class KilledAt:
    """A rank, as it was at first, dies before a step begins; or the agent of its host."""

    def __init__(self, step: int, rank: int, mark: Path, *, host: bool = False) -> None:
        self._step, self._rank, self._mark, self._host = step, rank, mark, host

    def before_step(self, trainer: Any, step: int) -> None:
        if step == self._step and os.environ.get("RANK") == str(self._rank) and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getppid() if self._host else os.getpid(), signal.SIGKILL)


class ScaledAt:
    """The chief asks for another number of workers, and continues when the others are about to leave."""

    def __init__(self, step: int, workers: int) -> None:
        self._step, self._workers = step, workers

    def before_step(self, trainer: Any, step: int) -> None:
        if step == self._step and trainer.is_chief:
            session = trainer._run.worker.session
            request_scale("run", self._workers)
            with session._heard:
                assert session._heard.wait_for(lambda: session.newest is not None, 60.0)


class ThroughMemory:
    """Stages of one host exchange tensors through shared memory, also after workers have joined or died."""

    def after_step(self, trainer: Any, step: int, stats: Any) -> None:
        messages = trainer._run.ready().engine.spread.divided.passes.runner._messages
        way = messages._find() if isinstance(messages, FollowingMessages) else messages
        assert isinstance(way, SharedMemoryPointToPoint), type(way)


class KilledInEvaluation(Dataset[Any]):
    """Data whose reader, if it is a certain rank, dies in the middle of it."""

    def __init__(self, rank: str) -> None:
        self._rows, self._rank, self._mark = data_for("CNN"), rank, Path(f"killed {rank} in evaluation")
        self._num_read = 0

    def __len__(self) -> int:
        return len(self._rows[0])

    def __getitem__(self, row: int) -> Any:
        self._num_read += 1
        if self._num_read == 10 and os.environ.get("RANK") == self._rank and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return tuple(column[row] for column in self._rows)


def train(strategy: Any, hooks: list[Any], validation: Any = None) -> mh.Trainer:
    trainer = make_trainer("CNN", strategy, "AdamW", hooks=hooks)
    checkpoint = mh.Checkpoints(every_steps=4)
    trainer.fit(data_for("CNN"), steps=STEPS, batch_size=16, checkpoint=checkpoint, validation=validation)
    return trainer


if __name__ == "__main__":
    name, file, *victims = sys.argv[1:]
    last = str((LAYOUTS[name].workers or 1) - 1)
    scaled = [one.removeprefix(SCALED) for one in victims if one.startswith(SCALED)]
    victims = [one for one in victims if not one.startswith(SCALED)]
    evaluating = [one.removesuffix(IN_EVALUATION) for one in victims if one.endswith(IN_EVALUATION)]
    killed = [
        KilledAt(KILLED_AT, int(one.removeprefix("host of ")), Path(f"killed {one}"), host=one.startswith("host"))
        for one in victims or [last]
        if not one.endswith(IN_EVALUATION)
    ]
    watch = [ThroughMemory()] if name == "mesh" and not why_not() else []
    asked = [ScaledAt(STEPS - 1, int(workers)) for workers in scaled]
    train(LAYOUTS[name], [*killed, *asked, *watch], KilledInEvaluation(evaluating[0]) if evaluating else None).save(
        file
    )
