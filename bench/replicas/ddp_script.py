"""The script that `ddp` measures, one process per worker: the trainer, and DistributedDataParallel between its steps.

DDP has a separate process group over Gloo in the same processes; its settings are in `torch_side.wrapped`.
"""

from __future__ import annotations

import argparse
import json
import os

import torch
import torch.distributed as dist
from torch import Tensor

import manyhands as mh
from bench.driver.interleave import Interleave, Peer
from bench.programs.models import loss, make_data, make_model, optimizer_of
from bench.programs.torch_side import hand_loop, wrapped
from bench.programs.workloads import WORKLOADS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--block-s", type=float, required=True)
    parser.add_argument("--meet-at", required=True, help="a file that DDP's process group may make")
    given = parser.parse_args()
    name, batch = given.workload, WORKLOADS[given.workload].batch
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(given.meet_at, world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    data = make_data(name)
    peers = {side: _peer(name, data, rank) for side in ("DDP", "DDP again")}
    hook = Interleave(peers, num_blocks=given.blocks, block_s=given.block_s, agree=_agree, barrier=dist.barrier)
    trainer = mh.Trainer(lambda: make_model(name), loss, optimizer_of(name), "mirrored", hooks=[hook])
    trainer.fit(data, steps=10**9, batch_size=batch * world_size)
    if trainer.is_chief:
        print(json.dumps({"seconds": hook.seconds, "steps": hook.steps_per_block, "threads": torch.get_num_threads()}))
    dist.destroy_process_group()


def _peer(workload: str, data: tuple[Tensor, Tensor], rank: int) -> Peer:
    torch.manual_seed(rank)  # DDP gives every rank rank 0's weights; only the order of the data should differ
    return hand_loop(workload, wrapped(make_model(workload)), data).run


def _agree(steps: int) -> int:
    """The chief's number, for every rank."""
    agreed = torch.tensor([steps])
    dist.broadcast(agreed, 0)
    return int(agreed)


if __name__ == "__main__":
    main()
