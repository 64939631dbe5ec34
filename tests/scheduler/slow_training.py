"""A training whose step takes a given time on one worker, and half of it on two, without using the processor.

`python slow_training.py STEPS SECONDS`: so many steps, each of so many seconds when one worker takes all 4 slices.
"""

import sys
import time

import torch

import manyhands as mh

ROWS = 8


class Sleepy:
    """Each slice takes its part of the step, as computation on a device would."""

    def __init__(self, step_s: float) -> None:
        self._slice_s = step_s / 4

    def __call__(self, model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        time.sleep(self._slice_s)
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


if __name__ == "__main__":
    steps, step_s = int(sys.argv[1]), float(sys.argv[2])
    data = torch.randn(ROWS * steps, 4), torch.randn(ROWS * steps, 1)
    trainer = mh.Trainer(
        model=lambda: torch.nn.Linear(4, 1),
        loss=Sleepy(step_s),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        slices=4,
    )
    trainer.fit(data, epochs=1, batch_size=ROWS)
    print("trained", steps)
