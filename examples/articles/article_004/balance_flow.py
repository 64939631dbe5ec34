"""Article 004, a flow of four steps: resources and plan adjusted while running (dynamic parallelism).

One of two workers is slower: it shares its core with other work. The run measures that, names the worker and the phase,
and moves slices to the faster one. The batch, its slices and so the result stay the same.

文章 004 的四步流程：运行中调整资源和计划（动态并行）。

两个 worker 中有一个较慢：它的核上还有别的工作。运行会测出来，指出是哪个 worker、慢在哪个阶段，并把切片移给快的那个。
批次和切片不变，所以结果也不变。
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn

import manyhands as mh

sys.path.append(str(Path(__file__).parents[1]))
from flow_record import Event, Flow, Mark, Step

FLOW = Flow(
    Step("Measure: who needs how long for equal work", "测量：同样的工作各用多久", Mark("slice")),
    Step("Name the slow worker, and the phase", "指出慢的 worker 和阶段",
         Event("Straggler", ("rank", "phase", "factor", "waiting"))),
    Step("Move slices to the faster worker", "把切片移给较快的 worker", Event("Divided", ("step", "slices"))),
    Step("Continue with that division; the result is the same", "按新的划分继续训练，结果不变",
         Event("StepDone", ("step", "took_s", "loss"), last=True)),
    repeats=8,
)  # fmt: skip

if __name__ == "__main__":
    hands = mh.join(mh.Mirrored(workers=2), slices=8, balance=True, seed=0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 2))
    model, optimizer = hands.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    FLOW.open(hands.run_dir)
    x = torch.randn(512, 64)
    for inputs, labels in hands.batches((x, (x[:, 0] > 0).long()), batch_size=64, steps=130):
        start = time.time()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        time.sleep(0.002 if hands.rank == 0 else 0.008)  # the core is busy with other work / 这个核在忙别的
        hands.backward(loss)
        if hands.steps_done in (40, 120):
            FLOW.note("slice", start, f"step {hands.steps_done + 1}, {len(inputs)} rows")
        hands.step()
    if hands.is_chief:
        FLOW.show(hands.run_dir)
