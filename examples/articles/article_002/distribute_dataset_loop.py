"""Article 002, a program: experimental_distribute_dataset, and a training step of one's own on every replica.

With twice the devices either the global batch doubles or the steps halve; which one is easily left unclear. Here a
dataset has global batches, and each replica takes its rows of every one: an epoch of 100 examples in batches of 20 is 5
steps, for any number of replicas. Per-replica losses are reduced by sum.

文章 002 的程序：experimental_distribute_dataset，以及在每个副本上运行自定义的训练步。

设备加倍，要么全局批次加倍，要么步数减半，这一点常常没有说清。这里数据集给出的是全局批次，每个副本取其中自己的几行：
100 个样本、每批 20 个，一轮总是 5 步，与副本数无关。各副本的损失按和归约。
"""

import torch
from torch import nn

from manyhands import distribute as tf_distribute

if __name__ == "__main__":
    strategy = tf_distribute.MirroredStrategy(workers=2, seed=0)
    hands = strategy.hands
    torch.manual_seed(0)
    x = torch.randn(100, 4)
    dataset = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long()), batch_size=20)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    rows = []

    @tf_distribute.function
    def train_step(inputs):
        features, labels = inputs
        rows.append(len(features))
        optimizer.zero_grad()
        losses = nn.functional.cross_entropy(model(features), labels, reduction="none")
        loss = tf_distribute.compute_average_loss(losses, global_batch_size=20)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for epoch in range(3):
        total, steps = 0.0, 0
        for inputs in strategy.experimental_distribute_dataset(dataset):
            total += float(strategy.reduce("SUM", strategy.run(train_step, args=(inputs,)), axis=None))
            steps += 1
        if hands.is_chief:
            print(f"epoch {epoch}: {steps} steps, {rows[-1]} of 20 rows on replica 0, loss {total / steps:.4f}")
