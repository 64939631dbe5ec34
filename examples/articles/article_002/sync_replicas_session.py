"""Article 002, a lost listing: synchronous parameter servers with SyncReplicasOptimizer.

Three listings of article 002 are lost, and what they contained is not known to us. In their places are three programs
of its subject. Gradients of `replicas_to_aggregate` parts make one update; with more workers than that, the rest are
backups that compute slow parts again. Servers need no token queue, and the weights are those of one process.

文章 002 丢失的代码：用 SyncReplicasOptimizer 的同步参数服务器。

文章 002 丢了三段代码，原来的内容我们不知道，这里换成同一主题的程序：replicas_to_aggregate 份梯度合成一次更新；worker
多出来的部分作为后备，重算慢的那几份。服务器不需要令牌队列，权重与单进程在整个批次上训练的结果相同。
"""

import torch
from torch import nn

from manyhands.distribute import train


def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


if __name__ == "__main__":
    x = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
    data = x, x.sum(1, keepdim=True)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    alone = nn.Linear(4, 1)
    alone.load_state_dict(model.state_dict())
    optimizer = train.SyncReplicasOptimizer(
        train.GradientDescentOptimizer(0.1), replicas_to_aggregate=2, total_num_replicas=2
    )
    train_op = optimizer.minimize(loss, model=model, data=data, batch_size=256)
    hooks = [optimizer.make_session_run_hook(True), train.StopAtStepHook(last_step=10)]
    with train.MonitoredTrainingSession(hooks=hooks) as sess:
        while not sess.should_stop():
            sess.run(train_op)
    sgd = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(10):  # the oracle: one process, the whole batch / 对照：单进程，整个批次
        sgd.zero_grad()
        loss(alone, data).backward()
        sgd.step()
    if sess.hands.is_chief:
        difference = (alone.weight - model.weight).abs().max().item()
        print(f"step {sess.global_step} of {sess.hands.world_size} workers, {difference:.1e} from one process")
