"""Article 001, a flow: mixed precision with fp16 and loss scaling, eight steps, on two workers.

It mixes fp16 with fp32, without fp64. Weights, sums and updates are fp32, layers compute in fp16, and the loss is
scaled so that small gradients do not become 0. One example is so large that its gradient overflows: both workers skip
that step, and the scale is halved. On a CPU fp16 is slower than fp32; the run says so.

文章 001 的流程：fp16 加损失缩放的混合精度，八个步骤，两个 worker。

混合的是 fp16 与 fp32，与 fp64 无关。权重、求和、更新都用 fp32，各层用 fp16 计算；损失要放大，否则小梯度会变成 0。有一
个样本特别大，它的梯度会溢出：两个 worker 都跳过这一步，缩放系数减半。在 CPU 上 fp16 比 fp32 慢，运行时会提示。
"""

import sys
from pathlib import Path

import torch
from torch import nn

import manyhands as mh

sys.path.append(str(Path(__file__).parents[1]))
from flow_record import Flow, Mark, Step

FLOW = Flow(
    Step("Keep the weights in fp32", "权重保存为 fp32", Mark("weights")),
    Step("Compute the layers in fp16", "各层用 fp16 计算", Mark("forward")),
    Step("Compute the loss in fp32", "损失用 fp32 计算", Mark("loss")),
    Step("Multiply the loss by a scale", "损失乘以缩放系数", Mark("scale")),
    Step("Backward pass of the scaled loss, in fp16", "对放大后的损失做 fp16 反向", Mark("backward")),
    Step("Divide by the scale, and sum over the workers in fp32", "除以缩放系数，用 fp32 跨 worker 求和", Mark("step")),
    Step("After an overflow all workers skip it; half the scale", "溢出时全体跳过，缩放系数减半", Mark("skipped")),
    Step("Otherwise update the weights in fp32", "否则用 fp32 更新权重", Mark("updated")),
    repeats=3,
)  # fmt: skip

if __name__ == "__main__":
    hands = mh.join(mh.Mirrored(workers=2), precision="fp16", seed=0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 2))
    FLOW.lap()
    model, optimizer = hands.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    FLOW.lap("weights", str(model[0].weight.dtype))
    FLOW.open(hands.run_dir)
    x, y = torch.randn(256, 64), torch.arange(256) % 2
    x[9] = x[10] = 2000.0  # with different labels: the gradient of one overflows / 标签不同，其中一个梯度会溢出
    for inputs, labels in hands.batches((x, y), batch_size=64, epochs=1):
        FLOW.lap()
        logits = model(inputs)
        FLOW.lap("forward", f"{logits.dtype}, largest input {inputs.max():.0f}")
        loss, scaled = nn.functional.cross_entropy(logits, labels), []
        FLOW.lap("loss", f"{loss.dtype}, {loss.item():.3f}")
        loss.register_hook(scaled.append)  # the scale x this worker's share of the batch / 缩放系数 x 占批次的份额
        logits.register_hook(lambda _, scaled=scaled: FLOW.lap("scale", f"gradient of the loss {scaled[0].item():.0f}"))
        hands.backward(loss)
        FLOW.lap("backward")
        before = model[2].bias[0].item()
        hands.step()
        FLOW.lap("step", f"a bias from {before:.6f} to {(after := model[2].bias[0].item()):.6f}")
        FLOW.lap("skipped" if before == after else "updated", f"{model[2].bias.dtype}")
    if hands.is_chief:
        FLOW.show(hands.run_dir)
