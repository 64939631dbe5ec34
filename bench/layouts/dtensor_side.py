"""Layers sharded by hand with torch's DTensor, taking turns: `python -m bench.layouts.dtensor_side WORKLOAD`.

As torch's tutorial does it: `parallelize_module`, pairs of layers by columns and rows, attention by heads, embedding
and output layer by vocabulary with `loss_parallel`. One process per rank, with torchrun's variables.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional

from bench.driver.turns import Turns, take_turns
from bench.programs.models import HEADS, SEQUENCE, VOCABULARY, WIDTH, HandLoop, make_data, make_model, optimizer_of
from bench.programs.workloads import WORKLOADS

__all__ = ["Decoder", "divided"]


def main() -> None:
    (workload,) = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)  # every rank uses the same rows
    dist.init_process_group("gloo")
    model = divided(workload, init_device_mesh("cpu", (dist.get_world_size(),)))
    parts = [param for param in model.parameters() if isinstance(param, DTensor)]
    wholes = [param for param in model.parameters() if not isinstance(param, DTensor)]
    # Two groups, because torch's optimizers do not accept both kinds of tensors in one.
    optimizer = optimizer_of(workload)([{"params": some} for some in (parts, wholes) if some])  # type: ignore[list-item]
    loop = HandLoop(model, optimizer, make_data(workload), WORKLOADS[workload].batch * dist.get_world_size())
    with loss_parallel() if workload == "transformer" else nullcontext():
        take_turns(Turns(threads=1, versions={"torch": torch.__version__}), loop.run)
    dist.destroy_process_group()


def divided(workload: str, mesh: DeviceMesh) -> nn.Module:
    if workload == "transformer":
        return _divided_decoder(mesh)
    model = make_model(workload)
    layers = [name for name, module in model.named_children() if isinstance(module, nn.Linear)]
    plan = {name: ColwiseParallel() if i % 2 == 0 else RowwiseParallel() for i, name in enumerate(layers)}
    return parallelize_module(model, mesh, plan)


class Block(nn.Module):
    """Computes what `nn.TransformerEncoderLayer` does, whose attention DTensor does not support.

    Queries, keys and values of a head are adjacent in one layer, so a shard of its outputs is a shard of the heads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.packed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.packed(self.norm1(x)).unflatten(-1, (-1, 3, WIDTH // HEADS))
        q, k, v = heads.permute(3, 0, 2, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(functional.relu(self.up(self.norm2(x))))
        return y


class Decoder(nn.Module):
    """The benchmarks' transformer."""

    def __init__(self, num_layers: int = 5) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(SEQUENCE, WIDTH))
        self.layers = nn.Sequential(*(Block() for _ in range(num_layers)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layers(self.tokens(x) + self.places))
        return y


def _divided_decoder(mesh: DeviceMesh) -> nn.Module:
    model = Decoder()
    columns, rows = ColwiseParallel(), RowwiseParallel()
    block = {"packed": columns, "out": rows, "up": columns, "down": rows}
    for layer in model.layers:
        parallelize_module(layer, mesh, block)
    words = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    return parallelize_module(model, mesh, words)


if __name__ == "__main__":
    main()
