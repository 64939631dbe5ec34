"""Article 004, a flow of four steps: flow parallelism, several tasks of a node at the same time.

Loader processes prepare examples, one worker trains while the other evaluates, and a checkpoint is written meanwhile.

文章 004 的四步流程：流程并行性，一个节点上同时进行多项任务。

加载进程准备样本，一个 worker 训练时另一个在评估，同时在后台写检查点。
"""

import sys
from pathlib import Path

import torch
from torch import nn

import manyhands as mh

sys.path.append(str(Path(__file__).parents[1]))
from flow_record import Event, Flow, Mark, Step

FLOW = Flow(
    Step("Load: other processes prepare examples", "加载：由别的进程准备后面的样本", Mark("load")),
    Step("Train: a gradient for the servers", "训练：为服务器计算梯度", Mark("train")),
    Step("Evaluate: one worker, while the other trains", "评估：一个 worker 评估，另一个在训练", Mark("evaluate")),
    Step("Save: in the background", "保存：在后台写入", Event("CheckpointSaved", ("step", "seconds"))),
    repeats=3,
    around="evaluate",
)  # fmt: skip


class Examples(torch.utils.data.Dataset):
    def __len__(self):
        return 192

    def __getitem__(self, index):  # takes some work, in a loader process / 在加载进程里，要花些时间
        FLOW.lap()
        noise = torch.randn(200_000, generator=torch.Generator().manual_seed(index)).sort().values
        FLOW.lap("load", f"example {index}")
        FLOW.open(self.run_dir, f"loader {self.rank}")
        return noise[::3125].clone(), noise[:1]


if __name__ == "__main__":
    loss = lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1])  # noqa: E731
    hands = mh.join(mh.ParameterServer(servers=1, workers=2, mode="async"), seed=0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))
    model, optimizer = hands.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    FLOW.open(hands.run_dir)
    data, held_out = Examples(), (torch.randn(65536, 64), torch.randn(65536, 1))
    data.run_dir, data.rank = hands.run_dir, hands.rank
    for batch in hands.batches(data, batch_size=8, epochs=2, num_workers=1):
        FLOW.lap()
        hands.backward(loss(model, batch))
        hands.step()
        FLOW.lap("train", f"{hands.steps_done} updates so far")
        if hands.is_chief and hands.stepped and hands.every(16):
            FLOW.lap("evaluate", f"loss {hands.evaluate(held_out, loss)['loss']:.3f}")
            hands.save()
    if hands.is_chief:
        FLOW.show(hands.run_dir)
