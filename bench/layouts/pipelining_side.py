"""A pipeline by hand with torch.distributed.pipelining, as a side that takes turns.

With torchrun's variables: `python -m bench.layouts.pipelining_side gpipe|1f1b|interleaved WORKLOAD`, once per rank.
Shapes are given, so that no pass or message is needed to infer them; stages are cut where ours are.
"""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn import functional

from bench.driver.turns import Turns, take_turns
from bench.programs.models import make_data, make_model, optimizer_of
from bench.programs.workloads import MICROBATCHES, STAGE_CUTS, WORKLOADS

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}


class PipelineLoop:
    """One rank's side of a training loop: the first rank has the inputs, the last one the labels and the loss."""

    def __init__(self, schedule: str, workload: str, rank: int, world: int) -> None:
        model, self._data = make_model(workload), make_data(workload)
        assert isinstance(model, nn.Sequential)
        self._rank, self._last, self._batch = rank, world - 1, WORKLOADS[workload].batch * world
        starts = [0, *(int(name) for name in STAGE_CUTS[schedule]), len(model)]
        modules = [model[a:b] for a, b in pairwise(starts)]
        inputs = self._data[0][: self._batch // MICROBATCHES]
        stages = []
        for index, module in enumerate(modules):
            outputs = module(inputs).detach().requires_grad_()  # torch infers from it whether gradients are sent back
            if index % world == rank:
                stages.append(
                    PipelineStage(
                        module, index, len(modules), torch.device("cpu"), input_args=inputs, output_args=outputs
                    )
                )
            inputs = outputs
        single = len(stages) == 1
        self._schedule = SCHEDULES[schedule](stages[0] if single else stages, MICROBATCHES, functional.cross_entropy)
        self._optimizer = optimizer_of(workload)([p for stage in stages for p in stage.submod.parameters()])
        self._order, self._start = torch.randperm(len(self._data[0])), 0
        self.running_loss = 0.0

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            rows = self._next_rows()
            self._optimizer.zero_grad(set_to_none=True)
            self._step(rows)
            self._optimizer.step()

    def _step(self, rows: Tensor) -> None:
        x, y = self._data
        losses: list[Tensor] = []
        args = (x[rows],) if self._rank == 0 else ()
        named = {"target": y[rows], "losses": losses} if self._rank == self._last else {}
        self._schedule.step(*args, **named)
        if losses:
            self.running_loss += torch.stack(losses).mean().item()

    def _next_rows(self) -> Tensor:
        if self._start + self._batch > len(self._order):
            self._order, self._start = torch.randperm(len(self._order)), 0
        self._start += self._batch
        return self._order[self._start - self._batch : self._start]


def main() -> None:
    schedule, workload = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)  # so that the first rank's rows match the last rank's labels
    dist.init_process_group("gloo")
    loop = PipelineLoop(schedule, workload, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    turns = Turns(threads=torch.get_num_threads(), versions={"torch": torch.__version__})
    take_turns(turns, loop.run)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
