"""Article 003, a program: CentralStorageStrategy, which is taken for fault tolerance there.

Central storage is one copy of the weights in the host's memory, with which all workers compute: it saves memory. If the
host is lost, so is the copy. What makes a run survive are checkpoints and elastic workers (article_004/fault_flow.py).
Keras's own fit is refused under it; the trainer takes the strategy's choice, and Keras models, too.

文章 003 的程序：CentralStorageStrategy，文中把它当作容错手段。

中心存储是把唯一一份权重放在主机内存里，所有 worker 用它计算：省的是内存。主机没了，这份权重也就没了。让训练能够继续的
是检查点和弹性 worker（见 article_004/fault_flow.py）。Keras 自己的 fit 在它下面会被拒绝；Trainer 接受这个策略的
choice，也接受 Keras 模型。
"""

import torch
from torch import nn

import manyhands as mh
from manyhands.distribute.experimental import CentralStorageStrategy


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


if __name__ == "__main__":
    strategy = CentralStorageStrategy(workers=2)
    trainer = mh.Trainer(
        lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)),
        loss,
        lambda params: torch.optim.Adam(params, lr=0.01),
        strategy.choice,
        seed=0,
    )
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    data = x, (x[:, 0] > 0).long()
    trainer.fit(data, epochs=3, batch_size=32, checkpoint=mh.Checkpoints(every_steps=8))
    results = trainer.evaluate(data)
    if trainer.is_chief:
        saved = sorted(path.name for path in (trainer.run_dir / "checkpoints").iterdir() if path.is_dir())
        print(f"loss {results['loss']:.4f}; what a lost host leaves is {saved[-1]}")
