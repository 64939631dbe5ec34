"""DistributedDataParallel, `fully_shard`, or loops by hand that exchange nothing, as a side that takes turns.

One process per rank: `python -m bench.programs.torch_side ddp|fsdp|alone WORKLOAD [ROWS]` with torchrun's variables.
Settings: see `wrapped` and `sharded`.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.driver.turns import Turns, take_turns
from bench.programs.models import HandLoop, make_data, make_model, optimizer_of
from bench.programs.workloads import WORKLOADS

__all__ = ["hand_loop", "sharded", "wrapped"]


def main() -> None:
    kind, workload, *rows = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ["RANK"]))  # DDP gives every rank rank 0's weights; the order of data is to differ
    if kind != "alone":
        dist.init_process_group("gloo")
    wrap = {"ddp": wrapped, "fsdp": sharded, "alone": lambda model: model}[kind]
    loop = hand_loop(workload, wrap(make_model(workload)), make_data(workload, *map(int, rows)))
    turns = Turns(threads=torch.get_num_threads(), versions={"torch": torch.__version__})
    take_turns(turns, loop.run)
    if kind != "alone":
        dist.destroy_process_group()


def wrapped(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def sharded(model: nn.Module) -> nn.Module:
    """As in torch's tutorial: shard every layer of the list separately, then the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layers = model if isinstance(model, nn.Sequential) else model.get_submodule("layers.layers")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def hand_loop(workload: str, model: nn.Module, data: tuple[Tensor, Tensor]) -> HandLoop:
    return HandLoop(model, optimizer_of(workload)(model.parameters()), data, WORKLOADS[workload].batch)


if __name__ == "__main__":
    main()
