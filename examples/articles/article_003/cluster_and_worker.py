"""Article 003, a program: a cluster object and a worker object (TFCluster, PSWorker), as classes to subclass.

The classes have start, join, start_server and shutdown. Written by hand, such a cluster loses the work of a worker that
dies. Here each call takes effect exactly once, also if its worker is killed in the middle: this program kills one. A
memory limit without a GPU falls back with a warning; PSWorker is for workers on other hosts, which join by a file.

文章 003 的程序：集群对象和 worker 对象（TFCluster、PSWorker），可以继承。

这些类有 start、join、start_server、shutdown。手写的集群，worker 一死，手上的工作也就丢了。这里每个调用恰好生效一次，
即使 worker 在中途被杀：本程序就杀掉一个。没有 GPU 时，显存上限会退回到 CPU 并给出警告；PSWorker 用于其他机器上凭文件
加入的 worker。
"""

import os
import signal

import torch

import manyhands as mh
from manyhands.distribute import train


class WatchedCluster(train.TFCluster):
    def on_worker_lost(self, number, why):
        print(f"worker {number} is lost ({why}) and will be replaced")


@mh.dispatch.remote
def add_gradient(ctx, value):
    ctx.add("w", torch.full((3,), value))
    return os.getpid()


if __name__ == "__main__":
    spec = {"worker": ["localhost:2222", "localhost:2223"], "ps": ["localhost:2224"]}
    train.limit_gpu_memory(1024)  # what PSWorker(memory_limit=1024) does
    with WatchedCluster(spec) as cluster:
        cluster.assign("w", torch.zeros(3))
        cluster.start_server()
        dispatcher = mh.dispatch.Dispatcher(cluster)
        calls = [dispatcher.schedule("add_gradient", args=(1.0,)) for _ in range(200)]
        calls[20].fetch()
        os.kill(cluster.worker_pids[0], signal.SIGKILL)
        dispatcher.join()
        pids = set(dispatcher.fetch(calls))
        print(f"w is {cluster.read('w').tolist()} after 200 calls; they ran in processes {sorted(pids)}")
