"""The same training for torchrun: DistributedDataParallel on Gloo, a checkpoint after every step, resumed at the start.

`torchrun ... -m bench.recovery.recovery_torchrun_script FOLDER`. A checkpoint each step is the best case for a restart:
it repeats nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from bench.programs.models import make_data, make_model, optimizer_of
from bench.programs.torch_side import wrapped
from bench.recovery.recovery_script import BATCH, MODEL, CommitLog, thinking_loss


def _join() -> int:
    """Join the other ranks of this restart; returns the rank.

    torchrun's store still has the addresses of the previous processes, to which Gloo then fails to connect (torch
    2.13): it only works with store keys that are unique to each restart.
    """
    store, rank, world_size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return rank


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, world_size, step = _join(), dist.get_world_size(), 0
    model = make_model(MODEL)
    optimizer = optimizer_of(MODEL)(model.parameters())
    saved, log = folder / "checkpoint.pt", CommitLog(folder)
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    replicated, (x, y) = wrapped(model), make_data(MODEL)
    while True:
        rows = torch.arange(step * BATCH + rank, (step + 1) * BATCH, world_size) % len(x)
        optimizer.zero_grad(set_to_none=True)
        thinking_loss(replicated, (x[rows], y[rows])).backward()
        optimizer.step()
        step += 1
        if rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f"{saved}.new")
            os.replace(f"{saved}.new", saved)
        log.write(step, os.environ["TORCHELASTIC_RESTART_COUNT"])


if __name__ == "__main__":
    main()
