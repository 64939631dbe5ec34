"""Article 001, a flow: mixed precision with bf16 and a type for each layer, eight steps, on two workers.

bf16 has the range of fp32, so no loss is scaled and no step skipped. Here the last layer computes in fp32; sums over
workers and updates always do. The finished model is written in half precision. fp64 is another choice, and not needed.

文章 001 的流程：bf16 加逐层选择类型的混合精度，八个步骤，两个 worker。

bf16 的范围与 fp32 相同，所以不缩放损失，也不跳过任何一步。类型可以逐层选择：这里最后一层用 fp32 计算。跨 worker 的求
和与更新始终是 fp32，训练好的模型以半精度保存。混合精度不需要 fp64。
"""

import sys
from pathlib import Path

import torch
from torch import nn

import manyhands as mh

sys.path.append(str(Path(__file__).parents[1]))
from flow_record import Event, Flow, Mark, Step

FLOW = Flow(
    Step("Choose the type of the run: bf16", "选择这次训练的类型：bf16", Event("RunStarted", ("precision", "workers"))),
    Step("Choose another type for layers that need it", "为有需要的层选择别的类型", Mark("last layer")),
    Step("Keep the weights in fp32, the same on every worker", "权重保存为 fp32，每个 worker 相同", Mark("weights")),
    Step("Compute the other layers in bf16", "其余各层用 bf16 计算", Mark("first layer")),
    Step("Compute the loss in fp32; nothing is scaled", "损失用 fp32 计算，不缩放", Mark("loss")),
    Step("Backward pass: gradients of the weights are fp32", "反向：权重的梯度是 fp32", Mark("backward")),
    Step("Sum over the workers and update in fp32", "跨 worker 求和并更新，都是 fp32", Mark("step")),
    Step("Write the finished model in half precision", "以半精度保存训练好的模型", Mark("save")),
)  # fmt: skip

if __name__ == "__main__":
    hands = mh.join(mh.Mirrored(workers=2, dtypes={"2": "fp32"}), precision="bf16", seed=0)
    model, kinds = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 2)), []
    model[2].register_forward_hook(lambda layer, inputs, output: kinds.append(output.dtype))
    FLOW.lap()
    model, optimizer = hands.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    FLOW.lap("weights", f"{model[0].weight.dtype}, first weight {model[0].weight[0, 0].item():.6f}")
    FLOW.open(hands.run_dir)
    x = torch.randn(256, 64)
    for inputs, labels in hands.batches((x, (x[:, 0] > 0).long()), batch_size=64, epochs=1):
        FLOW.lap()
        hidden = model[1](model[0](inputs))
        FLOW.lap("first layer", f"{hidden.dtype}, {len(inputs)} rows")
        logits = model[2](hidden)
        FLOW.lap("last layer", str(kinds[-1]))
        loss = nn.functional.cross_entropy(logits, labels)
        FLOW.lap("loss", f"{loss.dtype}, {loss.item():.3f}")
        hands.backward(loss)
        FLOW.lap("backward")
        hands.step()
        FLOW.lap("step", f"{model[0].weight.dtype}, first weight {model[0].weight[0, 0].item():.6f}")
    if hands.is_chief:
        half = {name: value.bfloat16() for name, value in model.state_dict().items()}
        torch.save(half, hands.run_dir / "half.pt")
        sizes = [sum(value.nbytes for value in values.values()) for values in (model.state_dict(), half)]
        FLOW.lap("save", "{} bytes become {}".format(*sizes))
        FLOW.show(hands.run_dir)
