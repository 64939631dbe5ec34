"""Article 004, a flow of seven steps: training with parameter servers, asynchronously.

This is not synchronous training: a server applies a gradient when it arrives, and the gradient may have missed updates
of the other worker, which the run counts. Synchronous servers are mode="sync". When the workers have finished, servers
bring their shards together in a checkpoint.

文章 004 的七步流程：参数服务器的异步训练。

这不是同步训练：服务器收到梯度就更新，这个梯度可能没看到另一个 worker 的更新，运行会统计落后了几次。同步的服务器是
mode="sync"。worker 都结束后，服务器把各自的分片合并成检查点。
"""

import sys
from pathlib import Path

import torch
from torch import nn

import manyhands as mh

sys.path.append(str(Path(__file__).parents[1]))
from flow_record import Event, Flow, Mark, Step

FLOW = Flow(
    Step("Servers take the parameters, each a part", "服务器存放参数，各占一部分",
         Event("RunStarted", ("strategy", "mode", "workers"))),
    Step("A worker fetches the parameters", "worker 取参数", Mark("fetch")),
    Step("It reads its own batch", "读取自己的批次", Mark("load")),
    Step("It computes the gradient", "计算梯度", Mark("gradient")),
    Step("It sends the gradient to the servers, and fetches newer parameters", "把梯度发给服务器，取回新的参数",
         Mark("push")),
    Step("The servers update at once, without waiting for the other workers", "服务器立即更新，不等其他 worker",
         Event("StepDone", ("step", "batch", "staleness"), where={"staleness": 1})),
    Step("When all workers have finished, the parts are merged and saved", "所有 worker 结束后，合并各部分并保存",
         Event("CheckpointSaved", ("step", "path", "num_bytes"), last=True)),
    repeats=4,
)  # fmt: skip

if __name__ == "__main__":
    hands = mh.join(mh.ParameterServer(servers=2, workers=2, mode="async"), seed=0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 2))
    FLOW.lap()
    model, optimizer = hands.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))  # servers serve from here on
    FLOW.lap("fetch", f"{sum(value.numel() for value in model.parameters())} values")
    FLOW.open(hands.run_dir)
    x = torch.randn(1024, 64)
    for inputs, labels, rows in hands.batches((x, (x[:, 0] > 0).long(), torch.arange(1024)), batch_size=32, epochs=2):
        FLOW.lap("load", f"rows {rows[:2].tolist()} and {len(rows) - 2} more")
        loss = nn.functional.cross_entropy(model(inputs), labels)
        hands.backward(loss)
        FLOW.lap("gradient", f"loss {loss.item():.4f}")
        hands.step()
        FLOW.lap("push", f"{hands.steps_done} updates so far")
    if hands.is_chief:
        FLOW.show(hands.run_dir)
