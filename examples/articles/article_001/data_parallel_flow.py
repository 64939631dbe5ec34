"""Article 001, a flow: data parallelism in eight steps, with the events of one run beside them.

Two workers have the same model, each takes its slice of every batch, gradients are aggregated and every worker makes
the same update. What is divided is the data: parameters are not, and no worker receives the others' rows.

文章 001 的流程：数据并行的八个步骤，旁边是一次真实训练的记录。

两个 worker 有相同的模型，各取每个批次中自己的切片，梯度聚合后大家做同样的更新。被切分的是数据，不是参数，也没有哪个
worker 会收到别人的样本。
"""

import sys
from pathlib import Path

import torch
from torch import nn

import manyhands as mh

sys.path.append(str(Path(__file__).parents[1]))
from flow_record import Event, Flow, Mark, Step

FLOW = Flow(
    Step("Divide the data: a batch of 64 rows, a slice for each worker", "切分数据：每批 64 行，每个 worker 一个切片",
         Event("RunStarted", ("strategy", "workers", "slices"))),
    Step("Put the same model on every worker", "每个 worker 放一份相同的模型", Mark("setup")),
    Step("Each worker takes its slice of the batch", "每个 worker 取批次中自己的切片", Mark("load")),
    Step("Forward pass and loss, on the worker's own rows", "前向计算和损失，只用自己的样本", Mark("forward")),
    Step("Backward pass: the gradient of that loss", "反向计算：得到该损失的梯度", Mark("backward")),
    Step("Aggregate the gradients of all workers", "聚合所有 worker 的梯度",
         Event("StepDone", ("step", "phases.reduce"))),
    Step("Every worker makes the same update", "每个 worker 做同样的更新", Mark("step")),
    Step("Repeat for the number of steps that was set", "重复，直到预定的步数",
         Event("StepDone", ("step", "total_steps", "loss"), last=True)),
)  # fmt: skip

if __name__ == "__main__":
    hands = mh.join(mh.Mirrored(workers=2), seed=0)
    model = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 2))
    FLOW.lap()
    model, optimizer = hands.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    FLOW.lap("setup", f"first weight {model[0].weight[0, 0].item():.6f}")
    FLOW.open(hands.run_dir)
    x = torch.randn(256, 32)
    for inputs, labels, rows in hands.batches((x, (x[:, 0] > 0).long(), torch.arange(256)), batch_size=64, steps=6):
        FLOW.lap("load", f"rows {rows[:3].tolist()} and {len(rows) - 3} more")
        loss = nn.functional.cross_entropy(model(inputs), labels)
        FLOW.lap("forward", f"loss {loss.item():.4f}")
        hands.backward(loss)
        FLOW.lap("backward")
        hands.step()
        FLOW.lap("step", f"first weight {model[0].weight[0, 0].item():.6f}")
    if hands.is_chief:
        FLOW.show(hands.run_dir)
