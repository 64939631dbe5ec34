"""Article 002, a program: FTRL, the optimizer of wide click models, with asynchronous parameter servers.

FTRL is for models with millions of variables. Its formula in TensorFlow is not that of the paper: l2 counts twice and
sums of squares begin at 0.1. FtrlOptimizer computes as TensorFlow does; mh.optim.FTRL takes either convention. Weights
that l1 removes are exactly 0.

文章 002 的程序：FTRL（宽点击率模型的优化器）与异步参数服务器。

FTRL 用于有上百万个变量的模型。TensorFlow 的公式与论文不同：l2 算两次，平方和从 0.1 开始。FtrlOptimizer 按 TensorFlow
计算；mh.optim.FTRL 两种约定都有。被 l1 去掉的权重恰好是 0。
"""

import torch
from torch import nn

import manyhands as mh
from manyhands.distribute import train


def loss(model, batch):
    return nn.functional.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1])


if __name__ == "__main__":
    random = torch.Generator().manual_seed(0)
    clicks = (torch.rand(512, 40, generator=random) < 0.2).float()
    data = clicks, (clicks[:, :4].sum(1) > 1).float()  # four of forty features matter / 40 个特征里只有 4 个有用
    make = train.FtrlOptimizer(0.5, l1_regularization_strength=2.0, l2_regularization_strength=0.1)
    strategy = mh.ParameterServer(servers=1, workers=2, mode="async")
    trainer = mh.Trainer(lambda: nn.Linear(40, 1), loss, make, strategy, seed=0)
    trainer.fit(data, epochs=4, batch_size=32)
    weight = trainer.model.weight.detach()
    results = trainer.evaluate(data)
    if trainer.is_chief:
        print(f"loss {results['loss']:.4f}; {int((weight == 0).sum())} of 40 weights are exactly 0")
