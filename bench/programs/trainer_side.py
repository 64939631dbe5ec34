"""Our side when sides take turns: `mh run -n 2 -m bench.programs.trainer_side WORKLOAD STRATEGY WORKERS [THINK_S]`.

A strategy is a name, or "pipeline" followed by its schedule.
"""

from __future__ import annotations

import sys
import time
from importlib.metadata import version

import torch
from torch import Tensor, nn

import manyhands as mh
from bench.driver.turns import TurnHook, Turns
from bench.programs.models import loss, make_data, make_model, optimizer_of
from bench.programs.workloads import MICROBATCHES, STAGE_CUTS, WORKLOADS


def main() -> None:
    name, strategy, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
    think_s = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0

    def thinking_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(think_s)
        return loss(model, batch)

    hook = TurnHook(lambda: Turns(threads=torch.get_num_threads(), versions={"manyhands": version("manyhands")}))
    trainer = mh.Trainer(
        lambda: make_model(name),
        thinking_loss if think_s else loss,
        optimizer_of(name),
        chosen(strategy, workers),
        hooks=[hook],
    )
    trainer.fit(make_data(name), steps=10**9, batch_size=WORKLOADS[name].batch * workers)


def chosen(strategy: str, workers: int) -> str | mh.PipelineParallel:
    name, _, schedule = strategy.partition(" ")
    if not schedule:
        return name
    return mh.PipelineParallel(workers, schedule=schedule, microbatches=MICROBATCHES, cuts=STAGE_CUTS[schedule])


if __name__ == "__main__":
    main()
