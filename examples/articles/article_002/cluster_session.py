"""Article 002, a program: ClusterSpec and Server, ps and worker tasks, device placement, a session's loop, a Saver.

In TensorFlow a ps task calls server.join() and stores variables. Here a server applies the optimizer, each gradient
exactly once, so a ps task runs the whole script, and join is left out. Variables are placed on the servers in turn,
each worker's gradient is applied when it arrives, and `batch_size` is the batch of one update. One command starts all
tasks of this host: mh run -n 2 --servers 2. Of a real cluster each task is started by hand, with --job_name and
--task_index; then the session is given server.target.

文章 002 的程序：ClusterSpec 和 Server、ps 与 worker 任务、设备放置、会话循环、Saver。

TensorFlow 的 ps 任务只调用 server.join() 存放变量。这里服务器执行优化器，每个梯度恰好生效一次，所以 ps 任务运行整个脚
本，不写 join。变量轮流放到各服务器，每个 worker 的梯度一到就更新，batch_size 是一次更新的批次。一条命令启动本机的全部
任务：mh run -n 2 --servers 2；真正的集群则逐个任务启动，带 --job_name 和 --task_index，并把 server.target 交给会话。
"""

import argparse

import torch
from torch import nn

from manyhands.distribute import train

CLUSTER = {"ps": ["localhost:2222", "localhost:2223"], "worker": ["localhost:2224", "localhost:2225"]}


def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--job_name")
    parser.add_argument("--task_index", type=int, default=0)
    flags = parser.parse_args()
    cluster = train.ClusterSpec(CLUSTER)
    server = train.Server(cluster, job_name=flags.job_name, task_index=flags.task_index) if flags.job_name else None
    with train.device(train.replica_device_setter(worker_device="/job:worker/task:0", cluster=cluster)):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
    x = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
    global_step = train.get_or_create_global_step()
    train_op = train.GradientDescentOptimizer(0.1).minimize(
        loss, global_step=global_step, model=model, data=(x, x.sum(1, keepdim=True)), batch_size=32
    )
    saver = train.Saver(model)
    config = train.ConfigProto(allow_soft_placement=True, log_device_placement=True)
    hooks = [train.StopAtStepHook(last_step=30)]
    master = server.target if server else ""
    with train.MonitoredTrainingSession(master=master, hooks=hooks, config=config) as sess:
        while not sess.should_stop():
            _, last_loss, step = sess.run([train_op, train_op.loss, global_step])
    if sess.hands.is_chief:
        print(f"step {step}, loss {last_loss:.5f}, saved {saver.save(sess, 'weights', global_step=step)}")
