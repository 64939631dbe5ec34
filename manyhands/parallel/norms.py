"""The global norm of a gradient: summed over fixed blocks in fp64, in order, so that it never depends on a layout."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["clip_", "global_norm"]

BLOCK = 2**16


def global_norm(grads: Iterable[Tensor]) -> float:
    squares = [
        torch.linalg.vector_norm(block, dtype=torch.float64).square()
        for grad in grads
        for block in torch.split(grad.detach().reshape(-1), BLOCK)
    ]
    if not squares:
        return 0.0
    return float(torch.stack(squares).cumsum(0)[-1].sqrt())


def clip_(grads: list[Tensor], norm: float, max_norm: float) -> None:
    """Scale `grads`, whose global norm is `norm`, down to `max_norm` where it is longer."""
    if norm > max_norm:
        torch._foreach_mul_(grads, max_norm / norm)
