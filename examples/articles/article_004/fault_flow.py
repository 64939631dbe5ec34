"""Article 004, a flow of six steps: fault tolerance. A worker is killed in the middle of a step.

The other worker completes the step in flight; a new one gets its state and continues with the data: no row is lost,
none is used twice. Checkpoints are for the case that no worker is left. CentralStorage would not help here.

文章 004 的六步流程：容错。一个 worker 在某一步的中途被杀掉。

另一个 worker 完成正在进行的这一步；新的 worker 得到它的状态，接着处理数据，不丢失也不重复。CentralStorage 帮不上忙。
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import manyhands as mh

sys.path.append(str(Path(__file__).parents[1]))
from flow_record import Event, Flow, Mark, Step

FLOW = Flow(
    Step("Save checkpoints, also at the start", "保存检查点，开始时就有", Event("CheckpointSaved", ("step", "path"))),
    Step("A worker dies: kill -9", "一个 worker 被 kill -9", Mark("killed")),
    Step("Its end is noticed, and named", "发现并指出是谁", Event("WorkerLost", ("rank", "pid", "reason"))),
    Step("The other completes the step in flight", "另一个完成正在进行的这一步", Mark("completed")),
    Step("A new worker joins, with the other's state", "新的 worker 加入，得到另一个的状态", Mark("joined")),
    Step("They train to the end, each row once", "一起训练到结束，每个样本恰好一次",
         Event("StepDone", ("step", "start", "loss", "generation"), last=True)),
    repeats=1,
)  # fmt: skip

if __name__ == "__main__":
    started = time.time()
    hands = mh.join(mh.Mirrored(workers=2, elastic=(1, 2)), seed=0)
    model = nn.Linear(64, 2)
    model, optimizer = hands.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    hands.resume()  # where no worker is left, and all start again / 没有 worker 活着、全部重来时
    x = torch.randn(256, 64)
    died = hands.run_dir / "died"
    for inputs, labels in hands.batches((x, (x[:, 0] > 0).long()), batch_size=64, steps=400):
        if started:
            FLOW.open(hands.run_dir, f"pid {os.getpid()}")
            FLOW.note("joined" if died.exists() else "began", started, f"at step {hands.steps_done}")
            started = None
        hands.backward(nn.functional.cross_entropy(model(inputs), labels))
        if hands.steps_done == 20 and not hands.is_chief and not died.exists():
            died.touch()
            FLOW.note("killed", time.time(), f"in step {hands.steps_done + 1}, after its backward pass")
            os.kill(os.getpid(), signal.SIGKILL)
        FLOW.lap()
        hands.step()
        if died.exists() and hands.stepped and hands.world_size == 1:
            FLOW.lap("completed", f"step {hands.steps_done}, alone")
        time.sleep(0.02)  # so that the run outlives the start of a process / 让训练比启动一个进程更久
    if hands.is_chief:
        FLOW.show(hands.run_dir)
