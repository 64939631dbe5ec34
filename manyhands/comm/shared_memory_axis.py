"""An axis whose ranks share memory: the same calls as over a process group, done when they return.

Nothing listens and nothing connects: ranks meet in a `Plane`. Start reading at `connect_plane`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import torch

from manyhands.comm.axis import Axis, Done, Pending
from manyhands.comm.host_memory import Segment
from manyhands.comm.shared_memory import Plane

__all__ = ["PlaneAxis", "connect_plane"]


class PlaneAxis(Axis):
    """Gradients have a way of their own through shared memory (`parallel.gradients.shared_memory_sum`)."""

    def __init__(self, plane: Plane, *, timeout_s: float) -> None:
        super().__init__(plane.rank, plane.world, plane, timeout_s=timeout_s)
        self.plane, self.waiting = plane, plane.waiting
        self._in_rank_order = _in_rank_order(plane.world)
        self.sockets: Callable[[], Axis] | None = None
        """The same ranks over sockets, connected on first use: for what shared memory has no way for."""

    def retire(self) -> None:
        self._group = None  # nothing is ever pending

    def sum_start(self, tensor: torch.Tensor, name: str) -> Pending:
        """Sum in place, rank 0's first: the same bits on every rank. The tensor has no gaps."""
        self.plane.all_reduce_(tensor, self._in_rank_order, name)
        return Done()

    def all_to_all_start(
        self, output: torch.Tensor, input: torch.Tensor, output_sizes: list[int], input_sizes: list[int], name: str
    ) -> Pending:
        assert self.sockets is not None, f"{name}: nobody has said how to reach the others"
        axis = self.sockets()
        axis.waiting = self.waiting
        return axis.all_to_all_start(output, input, output_sizes, input_sizes, name)

    def all_gather_start(self, output: torch.Tensor, input: torch.Tensor, name: str) -> Pending:
        self.plane.all_gather(output, input.contiguous(), name)
        return Done()

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, name: str) -> None:
        self.plane.reduce_scatter(output, input, self._in_rank_order, name)

    def _broadcast(self, raw: torch.Tensor, source: int, name: str) -> None:
        self.plane.broadcast_(raw, name, source=source)


def _in_rank_order(world: int) -> bytes:
    """One rank after the other, as a program of `Plane`: a number pushes, -1 adds."""
    steps = [0, *(step for rank in range(1, world) for step in (rank, -1))]
    return struct.pack(f"{len(steps)}i", *steps)


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
    """`memory` gives a segment of so many bytes, the same one to every rank; the rest is as `Plane` has it."""
    segment = memory(Plane.num_bytes(size))
    plane = Plane(segment, rank, size, timeout_s=timeout_s, ranks=ranks, here=here, missing=missing)
    return PlaneAxis(plane, timeout_s=timeout_s)
