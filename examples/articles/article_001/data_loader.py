"""Article 001, a program: a DataLoader with num_workers, which is taken for data parallelism there.

num_workers starts processes that read and collate; one process still computes every gradient. Data parallelism divides
each batch among workers that all compute. Here the same DataLoader feeds two workers: `batch_size` stays the global
batch, 100 examples in batches of 20 are 5 steps, and the losses are those of one process.

文章 001 的程序：带 num_workers 的 DataLoader，文中把它当作数据并行。

num_workers 只是启动读取和拼批的进程，梯度仍由一个进程计算。数据并行是把每个批次分给多个都参与计算的 worker。这里同一
个 DataLoader 供两个 worker 使用：batch_size 仍是全局批次，100 个样本、每批 20 个，一轮是 5 步，损失与单进程相
同。
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


if __name__ == "__main__":
    x = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=20, shuffle=True, num_workers=2)
    trainer = mh.Trainer(
        lambda: nn.Linear(8, 2), loss, lambda params: torch.optim.SGD(params, lr=0.5), mh.Mirrored(workers=2)
    )
    for row in trainer.fit(loader, epochs=3):
        print(f"epoch {row['epoch']} ends at step {row['step']}, loss {row['loss']:.4f}")
