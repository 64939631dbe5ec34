"""Article 001, a program: a pipeline by a custom loader, model and optimizer; stage_one(a), stage_two(b), combine.

In one process such branches are computed one after the other: it is a pipeline by name alone. Here one worker has
`stage_one`, another `stage_two` and `combine`; slices of each batch pass through both at the same time, each part has
its own optimizer, and `reducer` is the user's function of one parameter's gradients, one for each slice.

文章 001 的程序：用自定义的 loader、模型和优化器做流水线；stage_one(a)、stage_two(b)、combine。

在一个进程里，这样的分支只是先后计算，流水线徒有其名。这里一个 worker 有 stage_one，另一个有 stage_two 和 combine；批
次的切片同时流过两者，每个部分有自己的优化器，reducer 是用户自己的函数，参数是某个权重在各切片上的梯度。
"""

import torch
from torch import nn

import manyhands as mh


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.stage_one = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.stage_two = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
        self.combine = nn.Linear(32, 2)

    def forward(self, a, b):
        return self.combine(torch.cat([self.stage_one(a), self.stage_two(b)], 1))


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0], batch[1]), batch[2])


if __name__ == "__main__":
    a, b = torch.randn(128, 8), torch.randn(128, 4)
    optimizers = {
        "stage_one": lambda params: torch.optim.SGD(params, lr=0.1),
        "stage_two": lambda params: torch.optim.AdamW(params, lr=1e-2),
        "combine": lambda params: torch.optim.Adagrad(params, lr=0.1),
    }
    strategy = mh.PipelineParallel(stages=2, cuts=("stage_two",), reducer=lambda gradients: sum(gradients))
    trainer = mh.Trainer(Branches, loss, optimizers, strategy, slices=4)
    history = trainer.fit((a, b, (a[:, 0] + b[:, 0] > 0).long()), epochs=3, batch_size=32)
    if trainer.is_chief:
        print("loss", [round(row["loss"], 4) for row in history], "the picture is", trainer.run_dir / "pipeline.svg")
