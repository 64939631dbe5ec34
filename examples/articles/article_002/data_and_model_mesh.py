"""Article 002, a lost listing: data and model parallelism together (a hybrid over a mesh of workers).

Three listings of article 002 are lost, and what they contained is not known to us. In their places are three programs
of its subject. `mh.Mesh(data=1, tensor=2)` shards each layer over two workers; with four of them `data=2` makes two
replicas of that. Every worker has a part of the weights; the result is that of one process. Replicas alone never divide
parameters.

文章 002 丢失的代码：数据并行与模型并行结合（worker 网格上的混合并行）。

文章 002 丢了三段代码，原来的内容我们不知道，这里换成同一主题的程序。mh.Mesh(data=1, tensor=2) 把每一层切到两个 worker；
worker 有四个时用 data=2，就有两个这样的副本。每个 worker 只有一部分权重，处理相同的样本，结果与单进程相同。只用副本是
不会切分参数的。
"""

import torch
from torch import nn

import manyhands as mh


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def make_model():
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))


if __name__ == "__main__":
    x = torch.randn(128, 16, generator=torch.Generator().manual_seed(0))
    data = x, x[:, :4].argmax(1)
    hands = mh.join(mh.Mesh(data=1, tensor=2), seed=0)
    model = make_model()
    whole = sum(value.numel() for value in model.parameters())
    model, optimizer = hands.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for batch in hands.batches(data, batch_size=32, epochs=3):
        hands.backward(loss(model, batch))
        hands.step()
    results = hands.evaluate(data, loss)
    if hands.is_chief:
        print(f"{hands.world_size} workers, {whole} parameters in all, loss {results['loss']:.4f}")
