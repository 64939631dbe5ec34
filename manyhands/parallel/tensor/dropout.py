"""Dropout of a shard: each rank draws the mask of the whole tensor and uses its part.

So the ranks' generators stay equal, and the same elements are dropped as in one process.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyhands.parallel.tensor.autograd_collectives import Split

__all__ = ["dropout_part", "feature_dropout_part"]


def dropout_part(part: Tensor, p: float, split: Split) -> Tensor:
    """Like `functional.dropout` in training."""
    if p in (0.0, 1.0):
        return part * (1.0 - p)
    return part * _kept_part(part, p, split).div_(1.0 - p)


def feature_dropout_part(part: Tensor, p: float, split: Split) -> Tensor:
    """Like `functional.dropout1d`, `2d` and `3d` in training: whole channels are dropped."""
    if p in (0.0, 1.0):
        return part * (1.0 - p)
    noise = part.new_empty(*part.shape[:2], *[1] * (part.dim() - 2))
    return part * _kept_part(noise, p, split).div_(1.0 - p)


def _kept_part(like: Tensor, p: float, split: Split) -> Tensor:
    """This rank's part of the mask, 1 for kept and 0 for dropped; `like` has its shape, dtype and memory order."""
    sizes = list(like.shape)
    sizes[split.dim] = split.size
    whole = torch.empty_permuted(sizes, _memory_order(like), dtype=like.dtype, device=like.device)
    return split.part_of(whole.bernoulli_(1.0 - p)).clone()


def _memory_order(tensor: Tensor) -> list[int]:
    """Masks are drawn in the memory order of their elements, which must be that of the tensor."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
