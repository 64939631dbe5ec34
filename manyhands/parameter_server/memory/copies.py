"""Copies of large tensors that this process does not read next: past its caches, where the C extension is built."""

from __future__ import annotations

from torch import Tensor

from manyhands.native import library

__all__ = ["copy_large_"]

LARGE_BYTES = 2**20


def copy_large_(target: Tensor, source: Tensor) -> None:
    """`target.copy_(source)`, which costs more: that reads what it replaces. Both are in the memory of the host."""
    same_bytes = target.dtype == source.dtype and target.shape == source.shape
    dense = same_bytes and target.is_contiguous() and source.is_contiguous()
    if library is None or not dense or target.nbytes < LARGE_BYTES:
        target.copy_(source)
    else:
        library.copy(target.data_ptr(), source.data_ptr(), target.nbytes)
