"""Article 001, a flow: model parallelism in six steps, by layers, with the passes of one run beside them.

The layers are divided over two workers. Slices of a batch pass forward through both parts, and their gradients back;
they overlap. DistributedDataParallel, which is called model parallel there, divides no model.

文章 001 的流程：按层切分的模型并行，六个步骤，旁边是一次训练中的各次计算。

模型的层分给两个 worker，批次的切片先后经过两个部分，彼此重叠。文中为此用的 DistributedDataParallel 并不切分模型。
"""

import sys
from pathlib import Path

import torch
from torch import nn

import manyhands as mh

sys.path.append(str(Path(__file__).parents[1]))
from flow_record import Event, Flow, Mark, Step

FLOW = Flow(
    Step("Divide the model by its layers", "按层切分模型", Mark("layers")),
    Step("Put each part on a worker", "每个部分放一个 worker", Event("RunStarted", ("strategy", "workers", "slices"))),
    Step("Forward: the output of one part is sent to the next", "前向：前一部分的输出送给后一部分", Mark("forward")),
    Step("Backward, from the last part to the first", "反向：从最后一部分传回第一部分", Mark("backward")),
    Step("Aggregate the slices' gradients", "聚合各切片的梯度", Event("StepDone", ("step", "phases.reduce"))),
    Step("Update each part", "更新每个部分", Event("StepDone", ("step", "phases.update", "loss"))),
    repeats=8,
)  # fmt: skip


class Block(nn.Linear):
    def __init__(self, width):
        super().__init__(width, width)
        self.weight.register_hook(lambda gradient: FLOW.lap("backward"))

    def forward(self, x):
        FLOW.lap()
        output = super().forward(x).relu()
        FLOW.lap("forward", f"{len(x)} rows")
        output.register_hook(lambda gradient: FLOW.lap())
        return output


class Watch:
    def begin(self, trainer):
        FLOW.lap("layers", ", ".join(name for name, _ in trainer.model.named_children()))
        FLOW.open(trainer.run_dir)


if __name__ == "__main__":
    model = nn.Sequential(Block(1024), Block(1024))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    FLOW.lap()
    strategy = mh.PipelineParallel(stages=2, cuts=("1",))
    trainer = mh.Trainer(model, nn.MSELoss(), sgd, strategy, slices=4, hooks=[Watch()])
    trainer.fit((torch.randn(2048, 1024), torch.rand(2048, 1024)), epochs=1, batch_size=1024)
    if trainer.is_chief:
        FLOW.show(trainer.run_dir)
