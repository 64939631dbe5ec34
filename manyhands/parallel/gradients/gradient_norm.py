"""The global norm of a gradient: summed over fixed blocks in fp64, in order, so that it never depends on a layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["clip_factor", "global_norm", "norm_blocks", "norm_of", "squares_of"]

BLOCK = 2**16


def global_norm(grads: Iterable[Tensor]) -> float:
    return norm_of(squares_of(list(norm_blocks(grads))))


def norm_blocks(grads: Iterable[Tensor]) -> Iterator[Tensor]:
    for grad in grads:
        yield from torch.split(grad.detach().reshape(-1), BLOCK)


def squares_of(blocks: Sequence[Tensor]) -> Tensor:
    """Each block's share of the squared norm."""
    if not blocks:
        return torch.zeros(0, dtype=torch.float64)
    return torch.stack([torch.linalg.vector_norm(block, dtype=torch.float64).square() for block in blocks])


def norm_of(squares: Tensor) -> float:
    return float(squares.cumsum(0)[-1].sqrt()) if len(squares) else 0.0


def clip_factor(norm: float, max_norm: float | None) -> float:
    """The factor to multiply a gradient of global norm `norm` by: less than 1 where it exceeds `max_norm`."""
    return max_norm / norm if max_norm is not None and norm > max_norm else 1.0
