"""Article 002, a lost listing: MonitoredTrainingSession with its hooks, and a chief that saves and writes summaries.

Three listings of article 002 are lost, and what they contained is not known to us. In their places are three programs
of its subject. Hooks stop at a step, print losses, refuse NaN and count steps per second. `checkpoint_dir=` names the
run's directory: there the same command continues after an interruption. The chief is the run's; is_chief= decides
nothing.

文章 002 丢失的代码：MonitoredTrainingSession 和它的钩子，由 chief 保存检查点、写摘要。

文章 002 丢了三段代码，原来的内容我们不知道，这里换成同一主题的程序。钩子负责：到某一步停止、打印损失、遇到 NaN 报错、
统计每秒步数。checkpoint_dir= 指定训练目录，中断后用同一条命令在那里继续。chief 由运行决定，is_chief 可以写，但不起作
用。
"""

import torch
from torch import nn

from manyhands.distribute import train


class Watch(train.SessionRunHook):
    """A hook of the user's: called around every run. / 用户自己的钩子：每次 run 前后调用。"""

    def begin(self):
        self.losses = []

    def before_run(self, run_context):
        return train.SessionRunArgs(train_op.loss)

    def after_run(self, run_context, run_values):
        self.losses.append(run_values.results)


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


if __name__ == "__main__":
    x = torch.randn(320, 8, generator=torch.Generator().manual_seed(0))
    train_op = train.AdagradOptimizer(0.2).minimize(
        loss, model=lambda: nn.Linear(8, 2), data=(x, (x[:, 0] > 0).long()), batch_size=32
    )
    watch = Watch()
    hooks = [
        watch,
        train.StopAtStepHook(last_step=20),
        train.LoggingTensorHook({"loss": train_op.loss}, every_n_iter=10),
        train.NanTensorHook(train_op.loss),
        train.StepCounterHook(every_n_steps=10),
    ]
    with train.MonitoredTrainingSession(hooks=hooks, save_checkpoint_steps=10, save_summaries_steps=10) as sess:
        while not sess.should_stop():
            sess.run(train_op)
    if sess.hands.is_chief:
        print(f"{len(watch.losses)} steps, loss {watch.losses[0]:.4f} at first, {watch.losses[-1]:.4f} at last")
