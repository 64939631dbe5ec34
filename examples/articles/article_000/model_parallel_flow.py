"""Article 000, a flow: the three steps of model parallelism, by matrix decomposition, on two workers.

The matrices of the layers are decomposed: each worker has half of the first one's columns and half of the second one's
rows, and computes with its halves on the same rows of data. What is sent are partial results, summed after the second
layer. Gradients of a half are that worker's alone; nothing of a sharded matrix is aggregated over workers.

文章 000 的流程：模型并行的三个步骤，按矩阵分解，用两个 worker。

把各层的矩阵拆开：每个 worker 有第一个矩阵的一半列、第二个矩阵的一半行，用自己的那一半处理相同的样本。传输的是部分结果，
在第二层之后求和。每一半的梯度只属于那个 worker，切分后的矩阵不需要跨 worker 聚合梯度。
"""

import sys
from pathlib import Path

import torch
from torch import nn

import manyhands as mh

sys.path.append(str(Path(__file__).parents[1]))
from flow_record import Flow, Mark, Step

FLOW = Flow(
    Step("Decompose the model: each worker has a part of its matrices", "拆分模型：每个 worker 有矩阵的一部分",
         Mark("place")),
    Step("Every worker computes its part, on the same rows; partial results are summed",
         "每个 worker 计算自己的部分，样本相同，部分结果求和", Mark("compute")),
    Step("Gradients are put together, and each worker updates its part", "合并梯度，每个 worker 更新自己的部分",
         Mark("update")),
    repeats=3,
)  # fmt: skip


if __name__ == "__main__":
    hands = mh.join(mh.TensorParallel(workers=2), seed=0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 16))
    FLOW.lap()
    model, optimizer = hands.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    parts = [tuple(part.shape) for part in optimizer.param_groups[0]["params"]]
    FLOW.lap("place", f"parameters here: {parts}")
    FLOW.open(hands.run_dir)
    x = torch.randn(128, 64)
    for inputs, targets in hands.batches((x, x[:, :16]), batch_size=32, epochs=2):
        FLOW.lap()
        loss = nn.functional.mse_loss(model(inputs), targets)
        hands.backward(loss)
        FLOW.lap("compute", f"{len(inputs)} rows, loss {loss.item():.5f}")
        hands.step()
        FLOW.lap("update")
    if hands.is_chief:
        FLOW.show(hands.run_dir)
