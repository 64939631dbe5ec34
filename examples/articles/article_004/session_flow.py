"""Article 004, a flow of six steps: a session in a cluster, from its description to its end.

TensorFlow's names, and what each is here: a cluster of jobs and tasks, a device for each variable (with a log of the
placement), a session that initialises or restores, operations that run step by step, and a chief that saves. All tasks
run the same script; a session ends when one worker requests it.

文章 004 的六步流程：集群中的一个会话，从描述集群到会话结束。

使用 TensorFlow 的名称：由作业和任务组成的集群、每个变量的设备（有放置日志）、初始化或恢复的会话、逐步运行的操作、负责
保存的 chief。所有任务运行同一个脚本；任何一个 worker 都可以请求结束会话。
"""

import sys
from pathlib import Path

import torch
from torch import nn

from manyhands.distribute import train

sys.path.append(str(Path(__file__).parents[1]))
from flow_record import Event, Flow, Mark, Step

FLOW = Flow(
    Step("Describe the cluster: jobs, and their tasks", "描述集群：作业和任务", Mark("cluster")),
    Step("A process is started for each task", "为每个任务启动进程", Event("GenerationStarted", ("workers", "hosts"))),
    Step("Give each variable a device", "为每个变量指定设备", Mark("place")),
    Step("The session begins: initialised, or restored from a checkpoint", "会话开始：初始化，或从检查点恢复",
         Event("CheckpointSaved", ("step", "path"))),
    Step("Run the operation, step by step, until a hook stops it", "逐步运行操作，直到钩子停止它", Mark("run")),
    Step("The chief saves, and the session ends", "chief 保存，会话结束",
         Event("CheckpointSaved", ("step", "path"), last=True)),
    repeats=3,
)  # fmt: skip


def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


if __name__ == "__main__":
    FLOW.lap()
    cluster = train.ClusterSpec({"worker": ["localhost:2222", "localhost:2223"]})
    FLOW.lap("cluster", str(cluster.as_dict()))
    with train.device("/cpu:0"):
        torch.manual_seed(0)
        model = nn.Linear(128, 64)
    FLOW.lap("place", "weight and bias: /cpu:0")
    data = torch.randn(512, 128), torch.randn(512, 64)
    optimizer = train.TowerOptimizer(train.AdagradOptimizer(0.1), num_towers=2)
    train_op = optimizer.minimize(loss, model=model, data=data, batch_size=64)
    hooks = [train.StopAtStepHook(last_step=12)]
    config = train.ConfigProto(log_device_placement=True)
    with train.MonitoredTrainingSession(hooks=hooks, config=config, save_checkpoint_steps=6) as sess:
        while not sess.should_stop():
            FLOW.lap()
            FLOW.lap("run", f"loss {sess.run([train_op, train_op.loss])[1]:.4f}")
    FLOW.open(sess.hands.run_dir)
    if sess.hands.is_chief:
        FLOW.show(sess.hands.run_dir)
