"""One network under one mode: `python -m bench.modes.mode_program NETWORK MODE STEPS`, or with `turns` as STEPS.

With `turns` it is a side that takes turns with others; else it trains so many steps, and leaves in the run directory
what its workers measured of themselves, and the loss on held-out digits.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Any

import torch

import manyhands as mh
from bench.driver.turns import TurnHook, Turns
from bench.modes.networks import BATCH, SLICES, data, make_model
from manyhands.recipes.digits import loss, right
from manyhands.recipes.every_mode import MODES
from manyhands.recipes.every_strategy import Meter
from manyhands.strategies.registry import STRATEGIES

__all__ = ["CHECKPOINT_EVERY", "PidFile"]

CHECKPOINT_EVERY = 20


class PidFile:
    """A hook that leaves this worker's process id in the run directory, under its rank: one of them is killed."""

    def __init__(self) -> None:
        self._is_there = False

    def after_step(self, trainer: Any, step: int, stats: Any) -> None:
        if not self._is_there:
            (trainer.run_dir / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
            self._is_there = True


def main() -> None:
    network, name, steps = sys.argv[1:]
    takes_turns = steps == "turns"
    (mode,) = (mode for mode in MODES if mode.name == name)
    training, held_out = data()
    meter = Meter()
    hook = TurnHook(lambda: Turns(threads=torch.get_num_threads(), versions={"manyhands": version("manyhands")}))
    trainer = mh.Trainer(
        model=lambda: make_model(network),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.5),
        strategy=STRATEGIES[mode.strategy].settings(**mode.settings),
        metrics={"accuracy": right},
        slices=SLICES,
        seed=0,
        hooks=[hook] if takes_turns else [meter, PidFile()],
    )
    if takes_turns:
        trainer.fit(training, steps=10**9, batch_size=BATCH)
        return
    checkpoints = mh.Checkpoints(every_steps=CHECKPOINT_EVERY)
    trainer.fit(training, steps=int(steps), batch_size=BATCH, checkpoint=checkpoints)
    meter.leave_note(trainer)
    trainer.evaluate(held_out)


if __name__ == "__main__":
    main()
