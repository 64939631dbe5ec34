"""`python -m bench.hosts.text_loss_script ddp|diloco STEPS SEED`: a language model's loss on held-out text.

The first rank prints. With "ddp" the launcher sets torchrun's variables; with "diloco" it is `mh run`.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import manyhands as mh
from bench.programs.models import loss, make_model, optimizer_of, text
from bench.programs.torch_side import hand_loop, wrapped
from bench.programs.workloads import WORKLOADS

NAME = "text"


def main() -> None:
    kind, steps, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    model, is_first = (_ddp if kind == "ddp" else _diloco)(steps, seed)
    if is_first:
        model.eval()
        with torch.no_grad():
            print(f"LOSS {loss(model, text()[1]).item():.6f}", flush=True)


def _ddp(steps: int, seed: int) -> tuple[nn.Module, bool]:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    torch.manual_seed(seed)
    model = make_model(NAME)
    torch.manual_seed(1000 * seed + rank)  # for the order of data
    dist.init_process_group("gloo")
    hand_loop(NAME, wrapped(model), text()[0]).run(steps)
    dist.destroy_process_group()
    return model, rank == 0


def _diloco(steps: int, seed: int) -> tuple[nn.Module, bool]:
    trainer = mh.Trainer(lambda: make_model(NAME), loss, optimizer_of(NAME), "diloco", seed=seed)
    trainer.fit(text()[0], steps=steps, batch_size=2 * WORKLOADS[NAME].batch)
    return trainer.model, trainer.is_chief


if __name__ == "__main__":
    main()
