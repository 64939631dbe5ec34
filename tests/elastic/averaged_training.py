"""What the tests of averaged elastic runs train: plain SGD, so that a loop by hand computes where it must end.

`python averaged_training.py '{"steps": 60, "every": 5, "faults": [{"slot": 1, "step": 8, "at": "forward"}]}'`. A fault
is a kill -9, in the first process of its slot only. With "until_whole" training ends some steps after all who were lost
have been replaced. The weights are saved in the working directory.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.parallel.averaging.combine_ranks import Combination
from manyhands.spec.load import own_identity

ROWS, BATCH, SLICES, LR, SEED = 480, 48, 6, 0.2, 3
STEP = 0
"""The step under way, as the hook below knows it."""


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 4))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 16, generator=generator)
    return x, (x[:, :4] + 0.3 * torch.randn(ROWS, 4, generator=generator)).argmax(1)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


class Watch:
    """Keeps track of the step, and records each step that its hook is called for."""

    def __init__(self, until_whole: int) -> None:
        self.steps_seen: list[int] = []
        self._until_whole, self._fewest, self._whole_steps = until_whole, until_whole, 0

    def before_step(self, trainer: Any, step: int) -> None:
        global STEP
        STEP = step

    def after_step(self, trainer: Any, step: int, stats: Any) -> None:
        self.steps_seen.append(step)
        workers = trainer._run.worker.world_size
        self._fewest = min(self._fewest, workers)
        self._whole_steps = self._whole_steps + 1 if workers == self._until_whole else 0
        if self._fewest < self._until_whole and self._whole_steps == 13:
            trainer.request_stop()


def killed_before(owner: Any, name: str, step: int) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if step == STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def main(asked: dict[str, Any]) -> None:
    here = own_identity()
    for fault in asked.get("faults", []):
        if here is not None and here.slot == fault["slot"] and not here.joining:
            owner, name = (Combination, "advance") if fault["at"] == "averaging" else (nn.Tanh, "forward")
            killed_before(owner, name, fault["step"])
    watch = Watch(asked.get("until_whole", 0))

    def slow_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(asked.get("slow_s", 0.0))
        return loss(model, batch)

    trainer = mh.Trainer(
        model,
        slow_loss,
        lambda params: torch.optim.SGD(params, lr=LR),
        strategy=mh.LocalSGD(**asked["local_sgd"]),
        slices=SLICES,
        seed=SEED,
        hooks=[watch],
    )
    trainer.fit(data(), steps=asked.get("steps", 100_000), batch_size=BATCH, validation=data())
    trainer.save("model.safetensors")
    print("RESULT " + json.dumps({"step": trainer.step, "steps_seen": watch.steps_seen}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
