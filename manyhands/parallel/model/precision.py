"""Mixed precision: forward passes in bf16 or fp16, weights and sums in fp32, and the loss scaling fp16 needs.

Parameters stay fp32 (they are the master weights); autocast chooses the type of each operation. Small fp16 gradients
would underflow to zero, so the loss is multiplied by a scale before backward and the sum divided by it after; a step
with an overflow is skipped on every rank, because all ranks check the same sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["LossScale", "Precision", "fp16_slowdown"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
_NO_AUTOCAST = nullcontext()


class Precision:
    """The precision of forward passes: "fp32", "bf16" or "fp16"; with "fp64", model and data are fp64 already."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self._device = name, device
        self.dtype = _DTYPES.get(name, torch.float32)
        self.scale = LossScale() if name == "fp16" else None

    def autocast(self) -> AbstractContextManager[Any]:
        if self.name in ("fp32", "fp64"):
            return _NO_AUTOCAST
        return torch.autocast(self._device.type, dtype=self.dtype)


class LossScale:
    """Doubles after 2,000 good steps, halves after an overflow. State is two numbers, and is checkpointed."""

    GROWTH_STEPS = 2000
    LARGEST = 2.0**24
    MOST_SKIPPED = 50

    def __init__(self) -> None:
        self.value, self.good_steps = 2.0**16, 0
        self.skipped = 0
        """Consecutive steps that overflowed since this process started."""

    @property
    def is_hopeless(self) -> bool:
        """Whether so many steps in a row overflowed that no scale will help."""
        return self.skipped >= self.MOST_SKIPPED

    def update(self, *, overflow: bool) -> None:
        self.skipped = self.skipped + 1 if overflow else 0
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


def fp16_slowdown() -> tuple[str, float]:
    """The operation that fp16 slows down most on this CPU, and how many times as long it takes as in fp32.

    Forward and backward of a small product and a small convolution; a CPU may have fast kernels for one of them only.
    """
    factors = {
        name: _seconds(operation, torch.float16) / _seconds(operation, torch.float32)
        for name, operation in (("matrix product", _product), ("convolution", _convolution))
    }
    slowest = max(factors, key=lambda name: factors[name])
    return slowest, factors[slowest]


def _product(dtype: torch.dtype) -> torch.Tensor:
    a = torch.ones(128, 128, dtype=dtype, requires_grad=True)
    return (a @ a).sum()


def _convolution(dtype: torch.dtype) -> torch.Tensor:
    pictures = torch.ones(4, 8, 12, 12, dtype=dtype)
    return torch.conv2d(pictures, torch.ones(8, 8, 3, 3, dtype=dtype, requires_grad=True)).sum()


def _seconds(operation: Callable[[torch.dtype], torch.Tensor], dtype: torch.dtype) -> float:
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        operation(dtype).backward()  # type: ignore[no-untyped-call]
        best = min(best, time.perf_counter() - start)
    return best
