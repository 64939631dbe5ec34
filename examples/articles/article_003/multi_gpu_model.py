"""Article 003, a program: multi_gpu_model, one process that computes a batch in parts, one for each device.

Keras removed it, and it was slow: one process feeds all devices and gathers on the first. It runs here under its name,
on the CPU in parts where there are no GPUs. A strategy with a process for each device is what to use; both give the
same weights, which the program shows.

文章 003 的程序：multi_gpu_model，一个进程把批次分成几份，每个设备算一份。

Keras 已经删除了它，而且它很慢：一个进程要喂所有设备，再汇总到第一个设备。这里保留这个名字，没有 GPU 时在 CPU 上分份计
算。应该用每个设备一个进程的策略；两者得到相同的权重，程序会验证这一点。
"""

import torch
from torch import nn

import manyhands as mh
from manyhands.distribute import train


def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    data = x, x.sum(1, keepdim=True)
    first = nn.Linear(4, 1)
    second = nn.Linear(4, 1)
    second.load_state_dict(first.state_dict())

    trainer = mh.Trainer(second, loss, lambda params: torch.optim.SGD(params, lr=0.1), mh.Mirrored(workers=2))
    trainer.fit(data, steps=10, batch_size=64)

    in_parts = train.multi_gpu_model(first, gpus=2)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    bar = train.Progbar(10, verbose=2)
    for step in range(10):
        optimizer.zero_grad()
        value = loss(in_parts, data)
        value.backward()
        optimizer.step()
        bar.update(step + 1, [("loss", float(value.detach()))])
    difference = (first.weight - second.weight).abs().max().item()
    if trainer.is_chief:
        print(f"{difference:.1e} between one process in two parts and two workers")
