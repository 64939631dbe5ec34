"""Mixed precision: forward passes in bf16 or fp16, weights and sums in fp32, and the loss scaling fp16 needs.

Parameters stay fp32 (they are the master weights); autocast chooses the type of each operation. Small fp16 gradients
would underflow to zero, so the loss is multiplied by a scale before backward and the sum divided by it after; a step
with an overflow is skipped on every rank alike, because all of them look at the same sum.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["LossScale", "Precision", "fp16_slowdown"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """How forward passes run: "fp32", "bf16" or "fp16"."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self._device = name, device
        self.dtype = _DTYPES.get(name, torch.float32)
        self.scale = LossScale() if name == "fp16" else None

    def autocast(self) -> AbstractContextManager[Any]:
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self.dtype)


class LossScale:
    """Doubles after 2,000 good steps, halves after an overflow. State is two numbers, and is checkpointed."""

    GROWTH_STEPS = 2000
    LARGEST = 2.0**24

    def __init__(self) -> None:
        self.value, self.good_steps = 2.0**16, 0

    def update(self, *, overflow: bool) -> None:
        if overflow:
            self.value, self.good_steps = max(self.value / 2, 1.0), 0
            return
        self.good_steps += 1
        if self.good_steps == self.GROWTH_STEPS:
            self.value, self.good_steps = min(self.value * 2, self.LARGEST), 0

    def state(self) -> dict[str, float]:
        return {"value": self.value, "good_steps": self.good_steps}

    def restore(self, state: dict[str, float]) -> None:
        self.value, self.good_steps = float(state["value"]), int(state["good_steps"])


def fp16_slowdown(size: int = 384) -> float:
    """How many times as long an fp16 matrix product takes on this CPU as an fp32 one; a few milliseconds to find out."""
    seconds = {}
    for dtype in (torch.float32, torch.float16):
        a = torch.ones(size, size, dtype=dtype)
        a @ a
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            a @ a
            best = min(best, time.perf_counter() - start)
        seconds[dtype] = best
    return seconds[torch.float16] / seconds[torch.float32]
