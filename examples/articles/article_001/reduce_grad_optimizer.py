"""Article 001, a program: an optimizer that reduces the gradients itself, in reduce_grad or get_gradients.

torch calls no method of these names, so such an optimizer trains with unreduced gradients, and nothing fails. Here
`reduce_grad` is called once per step, on every worker, with each parameter's gradients, one for each slice of the
batch; their sum is the gradient of the mean. `get_gradients`, which would compute gradients, is refused by name.

文章 001 的程序：优化器在 reduce_grad 或 get_gradients 里自己归约梯度。

torch 不会调用这些名字的方法，这样的优化器用的是没有归约的梯度，也不报错。这里 reduce_grad 每一步在每个 worker 上调用
一次，参数是每个权重在各切片上的梯度，它们的和就是均值损失的梯度。要自己计算梯度的 get_gradients 则会被点名拒绝。
"""

import torch
from torch import nn

import manyhands as mh


class MedianSGD(torch.optim.SGD):
    """The median over the slices: a wild one does not count. / 取各切片的中位数，异常切片不起作用。"""

    calls = 0

    def reduce_grad(self, gradients):
        MedianSGD.calls += 1
        return [torch.stack(slices).median(0).values * len(slices) for slices in gradients]


class OwnGradients(torch.optim.SGD):
    def get_gradients(self, loss, params):
        return torch.autograd.grad(loss, params)


def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


if __name__ == "__main__":
    x = torch.randn(120, 4, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True)
    y[7] = 1e4  # one wild example
    trainer = mh.Trainer(
        lambda: nn.Linear(4, 1), loss, lambda p: MedianSGD(p, lr=0.1), mh.Mirrored(workers=2), slices=6
    )
    trainer.fit((x, y), epochs=4, batch_size=24)
    if trainer.is_chief:
        print("reduce_grad was called", MedianSGD.calls, "times in 20 steps; weights", trainer.model.weight.data)
    try:
        mh.Trainer(nn.Linear(4, 1), loss, lambda params: OwnGradients(params, lr=0.1)).fit(
            (x, y), steps=1, batch_size=24
        )
    except mh.ManyhandsError as error:
        print("refused:", str(error).splitlines()[0])
