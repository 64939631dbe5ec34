"""Article 003, a program: MultiWorkerMirroredStrategy with TF_CONFIG, which is called model parallel there.

It replicates: every worker has the whole model and its rows of each batch, and gradients are summed in every step. That
is synchronous data parallelism; no parameter is divided. Each host exports TF_CONFIG and runs the same script, here
with both tasks on this host: `python multi_worker_tf_config.py` starts two processes with their own TF_CONFIG.

文章 003 的程序：用 TF_CONFIG 的 MultiWorkerMirroredStrategy，文中称之为模型并行。

它做的是复制：每个 worker 都有完整的模型，各取批次中的几行，每一步对梯度求和。这是同步数据并行，没有切分任何参数。每台
机器设置自己的 TF_CONFIG，运行同一个脚本；这里两个任务都在本机：直接运行本文件会启动两个各有 TF_CONFIG 的进程。
"""

import json
import os
import socket
import subprocess
import sys

import torch
from torch import nn

import manyhands as mh
from manyhands import distribute as tf_distribute


def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def start_both_tasks():
    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.bind(("127.0.0.1", 0))
        cluster = {"worker": [f"127.0.0.1:{one.getsockname()[1]}" for one in (first, second)]}
    tasks = [json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}}) for index in (0, 1)]
    return [subprocess.Popen([sys.executable, __file__], env={**os.environ, "TF_CONFIG": task}) for task in tasks]


def main():
    strategy = tf_distribute.MultiWorkerMirroredStrategy()
    trainer = mh.Trainer(nn.Linear(4, 1), loss, lambda params: torch.optim.SGD(params, lr=0.1), strategy.choice)
    x = torch.randn(128, 4, generator=torch.Generator().manual_seed(0))
    history = trainer.fit((x, x.sum(1, keepdim=True)), epochs=3, batch_size=32)
    if trainer.is_chief:
        print("loss", [round(row["loss"], 4) for row in history])


if __name__ == "__main__":
    if "TF_CONFIG" in os.environ or "RANK" in os.environ:  # a task of the cluster, or a worker of `mh run`
        main()
    else:
        sys.exit(max([task.wait(timeout=300) for task in start_both_tasks()]))
