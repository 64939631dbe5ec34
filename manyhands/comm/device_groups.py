"""Combines two process groups of the same ranks: one for tensors on an accelerator, one for tensors in host memory.

NCCL takes CUDA tensors only, but ranks also exchange names, lengths, hashes and losses, which are on the CPU.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["GroupsByDevice"]


class GroupsByDevice:
    """The part of a process group that `Axis` uses; forwards each call to the group of the tensor's device."""

    def __init__(self, on_device: Any, in_memory: Any) -> None:
        self._on_device, self._in_memory = on_device, in_memory

    def _of(self, tensor: Tensor) -> Any:
        return self._in_memory if tensor.device.type == "cpu" else self._on_device

    def allreduce(self, tensors: list[Tensor]) -> Any:
        return self._of(tensors[0]).allreduce(tensors)

    def alltoall_base(self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int]) -> Any:
        return self._of(input).alltoall_base(output, input, output_sizes, input_sizes)

    def _allgather_base(self, output: Tensor, input: Tensor) -> Any:
        return self._of(input)._allgather_base(output, input)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        return self._of(tensors[0]).broadcast(tensors, options)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        return self._of(tensors[0]).send(tensors, to, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        return self._of(tensors[0]).recv(tensors, source, tag)
