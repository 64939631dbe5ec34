"""An axis over shared memory: the same calls as over a process group, complete when they return.

It opens no socket: ranks communicate through a `Plane`. Start reading at `connect_plane`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import torch

from manyhands.comm.axis import Axis, CompletedWork, Pending
from manyhands.comm.host_memory import Segment
from manyhands.comm.shared_memory import Plane

__all__ = ["PlaneAxis", "connect_plane"]


class PlaneAxis(Axis):
    """For everything but gradients, which `parallel.gradients.shared_memory_sum` sums in shared memory directly."""

    def __init__(self, plane: Plane, *, timeout_s: float) -> None:
        super().__init__(plane.rank, plane.world, plane, timeout_s=timeout_s)
        self.plane, self.waiting = plane, plane.waiting
        self._in_rank_order = _in_rank_order(plane.world)
        self.sockets: Callable[[], Axis] | None = None
        """The same ranks over sockets, connected on first use, for calls that shared memory does not support."""

    def retire(self) -> None:
        self._group = None  # nothing is ever pending

    def sum_start(self, tensor: torch.Tensor, name: str) -> Pending:
        """Sum in place in rank order: the same bits on every rank. The tensor is contiguous."""
        self.plane.all_reduce_(tensor, self._in_rank_order, name)
        return CompletedWork()

    def all_to_all_start(
        self, output: torch.Tensor, input: torch.Tensor, output_sizes: list[int], input_sizes: list[int], name: str
    ) -> Pending:
        assert self.sockets is not None, f"{name}: `sockets` is not set"
        axis = self.sockets()
        axis.waiting = self.waiting
        return axis.all_to_all_start(output, input, output_sizes, input_sizes, name)

    def all_gather_start(self, output: torch.Tensor, input: torch.Tensor, name: str) -> Pending:
        self.plane.all_gather(output, input.contiguous(), name)
        return CompletedWork()

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, name: str) -> None:
        self.plane.reduce_scatter(output, input, self._in_rank_order, name)

    def _broadcast(self, raw: torch.Tensor, source: int, name: str) -> None:
        self.plane.broadcast_(raw, name, source=source)


def _in_rank_order(world: int) -> bytes:
    """A program of `Plane` that adds the ranks in order: a number pushes that rank's values, -1 adds."""
    operations = [0, *(operation for rank in range(1, world) for operation in (rank, -1))]
    return struct.pack(f"{len(operations)}i", *operations)


def connect_plane(
    memory: Callable[[int], Segment],
    rank: int,
    size: int,
    *,
    timeout_s: float,
    ranks: Sequence[int] | None = None,
    here: Sequence[int] | None = None,
    missing: Callable[[], str],
) -> PlaneAxis:
    """`memory` returns a segment of the given number of bytes, the same one on every rank; the rest as in `Plane`."""
    segment = memory(Plane.num_bytes(size))
    plane = Plane(segment, rank, size, timeout_s=timeout_s, ranks=ranks, here=here, missing=missing)
    return PlaneAxis(plane, timeout_s=timeout_s)
