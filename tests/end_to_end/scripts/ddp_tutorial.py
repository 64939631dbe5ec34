"""Plain PyTorch in the manner of its DistributedDataParallel tutorial. All it knows is torchrun's variables."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main(out: str) -> None:
    dist.init_process_group("gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset, seed=1))
    model = DistributedDataParallel(nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    torch.save(model.module.state_dict(), Path(out) / f"rank-{rank}.pt")
    if rank == 0:
        print(f"trained on {dist.get_world_size()} ranks, local rank {local_rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
