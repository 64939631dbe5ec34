"""Article 001, a program: a loop with DistributedDataParallel, which is called model parallelism there.

DistributedDataParallel is data parallelism: every process has the whole model, takes its part of the data, and
gradients are averaged. Nothing of the model is divided; for that see pipeline_branches.py. The loop is plain PyTorch:
`mh run -n 2` starts it in place of torchrun, without a change. `python` alone starts one process.

文章 001 的程序：用 DistributedDataParallel 的训练循环，文中称之为模型并行。

DistributedDataParallel 是数据并行：每个进程都有完整的模型，各取一部分数据，梯度取平均，模型没有被切分；切分模型见
pipeline_branches.py。循环是原样的 PyTorch：用 `mh run -n 2` 代替 torchrun 启动，一行都不用改；直接用 python 就是单进
程。
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

if __name__ == "__main__":
    for name, alone in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, alone)  # without a launcher: a group of one
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(128, 8)
    dataset = TensorDataset(x, (x[:, 0] > 0).long())
    sampler = DistributedSampler(dataset, seed=1)
    loader = DataLoader(dataset, batch_size=32 // dist.get_world_size(), sampler=sampler)
    model = DistributedDataParallel(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            total += loss.detach() / len(loader)
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}, {dist.get_world_size()} processes, loss {total.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()
