"""Article 000, a flow: all-reduce, with the numbers of one run beside it.

Each worker computes a gradient on its own rows; all-reduce sums them, divides, and gives every worker the same mean. It
is for networks of any size, and for millions of variables: what is sent grows with the parameters, not with the data.
The mean must be over rows: here worker 0 has 24 rows and worker 1 has 8, and a mean of means would be wrong.

文章 000 的流程：all-reduce，旁边是一次训练的数字。

每个 worker 用自己的样本算梯度，all-reduce 把它们求和、相除，让每个 worker 得到同一个平均值。它适用于任意大小的网络，
也适用于上百万个变量：传输量取决于参数量，与数据量无关。平均必须按样本数计算：这里 worker 0 有 24 个样本，worker 1 有
8 个，“平均值的平均”是错的。
"""

import copy
import sys
from pathlib import Path

import torch
from torch import nn

import manyhands as mh

sys.path.append(str(Path(__file__).parents[1]))
from flow_record import Event, Flow, Mark, Step

FLOW = Flow(
    Step("Each worker computes the gradient of its rows", "每个 worker 用自己的样本算梯度", Mark("gradient")),
    Step("The gradients are summed over all workers", "对所有 worker 的梯度求和", Mark("sum")),
    Step("The sum is divided by the number of rows: the mean", "除以样本总数，得到平均梯度", Mark("mean")),
    Step("Every worker has the same mean, and makes the same update", "每个 worker 得到同一个平均值，做同样的更新",
         Mark("update")),
    Step("It is what one process computes from all rows", "与单进程在全部样本上的结果相同",
         Event("Logged", ("values",), where={"step": 0})),
)  # fmt: skip

if __name__ == "__main__":
    hands = mh.join(mh.Mirrored(workers=2), seed=0)
    model = nn.Linear(256, 64)
    mine = copy.deepcopy(model)  # updated by hand below: each worker has its own / 下面手工更新，每个 worker 各有一份
    hands.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    FLOW.open(hands.run_dir)
    x, y = torch.randn(32, 256), torch.randn(32, 64)
    rows = slice(0, 32) if hands.world_size == 1 else [slice(0, 24), slice(24, 32)][hands.rank]
    FLOW.lap()
    (gradient,) = torch.autograd.grad((mine(x[rows]) - y[rows]).square().mean(1).sum(), [mine.weight])
    FLOW.lap("gradient", f"{len(x[rows])} rows, first entry {gradient[0, 0].item():.4f}")
    total, count = hands.reduce(gradient, "sum"), hands.reduce(torch.tensor(float(len(x[rows]))), "sum")
    FLOW.lap("sum", f"{count:.0f} rows, first entry {total[0, 0].item():.4f}, {total.numel() * 4} bytes")
    mean = total / count
    FLOW.lap("mean", f"first entry {mean[0, 0].item():.6f}")
    (alone,) = torch.autograd.grad((mine(x) - y).square().mean(), [mine.weight])
    FLOW.lap()
    with torch.no_grad():
        mine.weight -= 0.1 * mean
    FLOW.lap("update", f"first weight {mine.weight[0, 0].item():.6f}")
    hands.log(distance_from_one_process=(alone - mean).abs().max())
    if hands.is_chief:
        FLOW.show(hands.run_dir)
