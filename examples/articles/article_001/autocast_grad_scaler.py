"""Article 001, a program: a loop with autocast and GradScaler.

Mixed precision is described there as fp64 with fp32. It is fp16 (or bf16) with fp32: weights, sums and the optimizer
stay fp32. autocast, loss scaling, unscaling and the step that is skipped after an overflow are in `precision="fp16"`;
with several workers an overflow on one makes all of them skip. On a CPU without fp16 arithmetic it is slower, which the
run measures and prints.

文章 001 的程序：用 autocast 和 GradScaler 的训练循环。

文中把混合精度说成 fp64 与 fp32 的混合。其实是 fp16（或 bf16）与 fp32：权重、求和、优化器都是 fp32。autocast、损失缩放、
反缩放、溢出后跳过的那一步，都在 precision="fp16" 里；多个 worker 时，一个溢出，全体都跳过。在没有 fp16 运算的 CPU 上
它更慢，运行时会测量并打印出来。
"""

import torch
from torch import nn

import manyhands as mh

if __name__ == "__main__":
    hands = mh.join(mh.Mirrored(workers=2), precision="fp16", slices=2, seed=0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    seen = []
    model[0].register_forward_hook(lambda layer, inputs, output: seen.append(output.dtype))
    model, optimizer = hands.setup(model, torch.optim.SGD(model.parameters(), lr=0.2))
    x = torch.randn(256, 8)
    for inputs, labels in hands.batches((x, (x[:, 0] > 0).long()), batch_size=32, epochs=2):
        loss = nn.functional.cross_entropy(model(inputs), labels)  # autocast is on in here
        hands.backward(loss)  # of the scaled loss
        hands.step()  # unscales, checks, updates or skips
        if hands.stepped and hands.every(4) and hands.is_chief:
            print(f"step {hands.steps_done}, loss {hands.loss:.4f}")
    if hands.is_chief:
        print("the layer computed in", seen[-1], "and its weights are", model[0].weight.dtype)
