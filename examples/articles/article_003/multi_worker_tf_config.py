"""Article 003, a program: MultiWorkerMirroredStrategy with TF_CONFIG, which is called model parallel there.

It replicates: every worker has the whole model and its rows of each batch, and gradients are summed in every step. That
is synchronous data parallelism; no parameter is divided. Each host exports TF_CONFIG and runs the same script, here
with both tasks on this host: `python multi_worker_tf_config.py` starts two processes with their own TF_CONFIG. In
`main` only the imports are changed.

文章 003 的程序：用 TF_CONFIG 的 MultiWorkerMirroredStrategy，文中称之为模型并行。

它做的是复制：每个 worker 都有完整的模型，各取批次中的几行，每一步对梯度求和。这是同步数据并行，没有切分任何参数。每台
机器设置自己的 TF_CONFIG，运行同一个脚本；这里两个任务都在本机：直接运行本文件会启动两个各有 TF_CONFIG 的进程。main 里
只改了 import。
"""

import json
import os
import socket
import subprocess
import sys

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported / 必须在导入 Keras 之前
import keras
import numpy as np

from manyhands import distribute as tf_distribute


def start_both_tasks():
    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.bind(("127.0.0.1", 0))
        cluster = {"worker": [f"127.0.0.1:{one.getsockname()[1]}" for one in (first, second)]}
    tasks = [json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}}) for index in (0, 1)]
    return [subprocess.Popen([sys.executable, __file__], env={**os.environ, "TF_CONFIG": task}) for task in tasks]


def main():
    strategy = tf_distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    x = np.random.default_rng(0).normal(size=(128, 4)).astype("float32")
    history = model.fit(x, x.sum(1, keepdims=True), batch_size=32, epochs=3, verbose=0)
    print(
        "loss", [round(value, 4) for value in history.history["loss"]], "of", strategy.num_replicas_in_sync, "replicas"
    )


if __name__ == "__main__":
    if "TF_CONFIG" in os.environ or "RANK" in os.environ:  # a task of the cluster, or a worker of `mh run`
        main()
    else:
        sys.exit(max([task.wait(timeout=300) for task in start_both_tasks()]))
