"""DistributedDataParallel, or loops by hand that exchange nothing, where sides take turns: one process per rank.

`python -m bench.torch_side ddp|alone WORKLOAD [ROWS]` with torchrun's variables. Settings of DDP: see `wrapped`.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.models import HandLoop, make_data, make_model, optimizer_of
from bench.turns import Turns, take_turns
from bench.workloads import WORKLOADS

__all__ = ["hand_loop", "wrapped"]


def main() -> None:
    kind, workload, *rows = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ["RANK"]))  # DDP gives every rank rank 0's weights; the order of data is to differ
    if kind == "ddp":
        dist.init_process_group("gloo")
    model = make_model(workload)
    loop = hand_loop(workload, wrapped(model) if kind == "ddp" else model, make_data(workload, *map(int, rows)))
    turns = Turns(threads=torch.get_num_threads(), versions={"torch": torch.__version__})
    take_turns(turns, loop.run)
    if kind == "ddp":
        dist.destroy_process_group()


def wrapped(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def hand_loop(workload: str, model: nn.Module, data: tuple[Tensor, Tensor]) -> HandLoop:
    return HandLoop(model, optimizer_of(workload)(model.parameters()), data, WORKLOADS[workload].batch)


if __name__ == "__main__":
    main()
