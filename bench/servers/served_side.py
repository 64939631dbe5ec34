"""Our side with parameter servers, when sides take turns: `mh run ... -m bench.servers.served_side WORKLOAD MODE PACE`.

PACE is "steady", or says which worker is slow: with "one-slow" worker 1 takes five times as long for everything, with
"often-slow" every worker for a random fifth of its slices. Workers mostly sleep: two cores are enough for four.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from importlib.metadata import version

import torch
from torch import Tensor, nn

import manyhands as mh
from bench.driver.turns import TurnHook, Turns
from bench.programs.models import loss, make_data, make_model, optimizer_of
from bench.programs.workloads import SERVED_ROWS, WORKLOADS

__all__ = ["THINK_S", "thinking"]

THINK_S = 0.04
TIMES_SLOWER, OFTEN = 5, 0.2


def main() -> None:
    name, mode, pace = sys.argv[1:]
    workers = int(os.environ["WORLD_SIZE"])
    each = workers if mode == "async" else 1  # in async every worker's gradient is a separate update
    hook = TurnHook(lambda: Turns(threads=torch.get_num_threads(), versions={"manyhands": version("manyhands")}), each)
    trainer = mh.Trainer(
        lambda: make_model(name),
        _loss(thinking(pace, int(os.environ["RANK"]))),
        optimizer_of(name),
        mh.ParameterServer(mode=mode),
        hooks=[hook],
    )
    batch = WORKLOADS[name].batch * workers // each
    trainer.fit(make_data(name, SERVED_ROWS), steps=10**9, batch_size=batch)


def thinking(pace: str, rank: int) -> Callable[[], float]:
    """How long the next slice sleeps in addition to its computation."""
    draw = random.Random(rank)
    match pace:
        case "one-slow":
            return lambda: THINK_S * (TIMES_SLOWER if rank == 1 else 1)
        case "often-slow":
            return lambda: THINK_S * (TIMES_SLOWER if draw.random() < OFTEN else 1)
    return lambda: 0.0


def _loss(think: Callable[[], float]) -> Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]:
    def thinking_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if seconds := think():
            time.sleep(seconds)
        return loss(model, batch)

    return thinking_loss


if __name__ == "__main__":
    main()
