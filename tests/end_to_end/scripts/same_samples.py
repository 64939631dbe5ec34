"""A first attempt at DistributedDataParallel: right but for the sampler, so that all ranks train on the same rows."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    if "join" in sys.argv:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    with torch.no_grad():
        for _ in DataLoader(dataset, batch_size=16):  # evaluation, which every rank may do in full
            pass
    model: nn.Module = nn.Linear(8, 3)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    for _ in range(2):
        for x, y in DataLoader(dataset, batch_size=16):
            nn.functional.cross_entropy(model(x), y).backward()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
