"""The same network on handwritten digits under one strategy: what `mh demo` runs, once for each of its modes.

`mh run -n 2 -m manyhands.recipes.every_strategy mirrored`; `every_mode.MODES` has the names. No dropout, no batch
statistics, plain SGD with momentum and only smooth functions: so every mode but the two that are made to differ has to
end with the weights of one process, and a rounding error stays one. Each worker leaves worker-PID.json in the run
directory, the chief model.safetensors.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

import manyhands as mh
from manyhands.comm.handed_over import bytes_handed_over
from manyhands.recipes.digits import load, loss, right
from manyhands.recipes.every_mode import MODES
from manyhands.strategies.registry import STRATEGIES

__all__ = ["Meter", "WorkerNote", "held_memory", "make_model"]

WIDTH, SLICES, BATCH = 768, 2, 64
MEAN, DEVIATION = 0.3, 0.4
"""Of the pictures' pixels, rounded."""


class WorkerNote(msgspec.Struct, kw_only=True):
    """What one worker measured of itself."""

    memory_bytes: int
    """Growth of its memory from before the network was made until the last step; shared memory counts in parts."""
    handed_over: int
    """Bytes that it gave to other processes in its steps, without the first."""
    steps: int
    """How many steps that were."""
    is_chief: bool


class Meter:
    """A hook of every worker: memory and bytes, between its first step and its last."""

    def __init__(self) -> None:
        self._before = held_memory()
        self._handed_over = self.steps = self.handed_over = 0

    def after_step(self, trainer: Any, step: int, stats: Any) -> None:
        total, self.steps = bytes_handed_over(), self.steps + 1
        if self.steps == 1:
            self._handed_over = total
        self.handed_over = total - self._handed_over

    def leave_note(self, trainer: Any) -> None:
        """Write it to the run directory, in a file of this worker."""
        note = WorkerNote(
            memory_bytes=held_memory() - self._before,
            handed_over=self.handed_over,
            steps=max(0, self.steps - 1),
            is_chief=trainer.is_chief,
        )
        (trainer.run_dir / f"worker-{os.getpid()}.json").write_bytes(msgspec.json.encode(note))


def held_memory() -> int:
    """Anonymous memory of this process, and its part of what it shares; without files, such as torch's libraries."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    kilobytes = {line.split()[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
    return 1024 * (kilobytes["Anonymous:"] + kilobytes["Pss_Shmem:"])


def make_model() -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, WIDTH), nn.GELU()]
    for _ in range(2):
        layers += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=[mode.name for mode in MODES])
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    (mode,) = (mode for mode in MODES if mode.name == options.mode)
    training, held_out = (((pictures - MEAN) / DEVIATION, labels) for pictures, labels in load())
    meter = Meter()
    trainer = mh.Trainer(
        model=make_model,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.5),
        strategy=STRATEGIES[mode.strategy].settings(**mode.settings),
        metrics={"accuracy": right},
        slices=SLICES,
        seed=0,
        hooks=[meter],
    )
    trainer.fit(training, epochs=options.epochs, batch_size=BATCH)
    meter.leave_note(trainer)
    results = trainer.evaluate(held_out)
    if trainer.is_chief:
        print(f"held-out digits: {results['accuracy']:.2%} correct, loss {results['loss']:.4f}")
    trainer.save(trainer.run_dir / "model.safetensors")


if __name__ == "__main__":
    main()
