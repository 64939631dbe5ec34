"""Push and pull of 100 MB, as sides that take turns: `-m bench.servers.push_side served` under `mh run`, or `copies`.

"served" is a whole step of one worker and one server with a model whose forward and backward take no time: its gradient
is precomputed. So a step is a push, into shared memory and from there into new weights, and a pull of those. "copies"
copies as many bytes twice, in one process.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

import manyhands as mh
from bench.driver.turns import TurnHook, Turns, take_turns

__all__ = ["NUM_BYTES"]

NUM_BYTES = 100_000_000
NUMEL = NUM_BYTES // 4


class _Ready(torch.autograd.Function):
    """Returns zero, and a precomputed gradient in backward."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return weights.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor, None]:
        return ctx.gradient.detach(), None  # another tensor on the same memory, which autograd need not copy


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(NUMEL))
        self.gradient = torch.ones(NUMEL)

    def forward(self) -> Tensor:
        found: Tensor = _Ready.apply(self.weights, self.gradient)  # type: ignore[no-untyped-call]
        return found


def _served() -> None:
    hook = TurnHook(lambda: Turns(threads=torch.get_num_threads(), versions={"manyhands": version("manyhands")}))
    strategy = mh.ParameterServer(mode="async")
    trainer = mh.Trainer(Weights, lambda model, _: model(), _descend, strategy, hooks=[hook])
    trainer.fit((torch.zeros(100_000, 1),), steps=10**9, batch_size=1)


def _descend(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-6)


def _copies() -> None:
    torch.set_num_threads(1)
    buffers = [torch.ones(NUMEL) for _ in range(3)]

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            buffers[1].copy_(buffers[0])
            buffers[2].copy_(buffers[1])

    take_turns(Turns(threads=1, versions={"torch": torch.__version__}), run)


if __name__ == "__main__":
    _served() if sys.argv[1] == "served" else _copies()
