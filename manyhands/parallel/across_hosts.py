"""Sums between hosts, each worker for its part: shared memory inside a host, a network between them.

The workers of a host have consecutive slices, so a host holds few nodes of the slice tree, whatever its number of
workers. Each worker sums its part of those nodes from the rows of its host, and exchanges them with the worker in the
same place of every other host. A link so carries each gradient once, not once per worker. What arrives are rows like
any others, for this worker's part. Start reading at `AcrossHosts.exchange`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.comm.axis import Axis
from manyhands.comm.shared_memory import Plane
from manyhands.parallel.tree import Node, nodes_of, program

__all__ = ["AcrossHosts"]


class AcrossHosts:
    """`axis` has the workers in this one's place, one per host; every host has as many workers as `plane` has ranks."""

    def __init__(self, axis: Axis, plane: Plane) -> None:
        self._axis, self._plane = axis, plane

    @property
    def first_rank(self) -> int:
        """Of this host's workers."""
        return self._axis.rank * self._plane.world

    def arrange(self, shares: Sequence[range], count: int, held: Sequence[Node], part: range) -> None:
        """For these shares of `count` slices: `held` are the nodes of this host's rows, in order; `part` is ours."""
        world = self._plane.world
        hosts = [_joined(shares[host * world : (host + 1) * world]) for host in range(self._axis.size)]
        nodes = [nodes_of(slices, count) for slices in hosts]
        self._programs = [program(held, count, top=node) for node in nodes[self._axis.rank]]
        most = max(map(len, nodes))
        self._mine = torch.zeros(most, len(part))
        self._everyone = torch.zeros(self._axis.size, most, len(part))
        self._part = part
        self.program = program([node for of_host in nodes for node in of_host], count)
        self.rows = tuple(
            # As if the whole row were there: element e of it is at row + 4 * e, for e in the part.
            self._everyone[host, place].data_ptr() - 4 * part.start
            for host, of_host in enumerate(nodes)
            for place in range(len(of_host))
        )

    def exchange(self, rows: Sequence[int], name: str) -> int:
        """Sum this host's rows into its nodes, and get the other hosts'. Returns how many bytes were sent."""
        sources = [row + 4 * self._part.start for row in rows]
        for along, target in zip(self._programs, self._mine, strict=False):
            self._plane.sum_at(target.data_ptr(), sources, len(self._part), torch.float32, along)
        self._axis.all_gather_start(self._everyone.view(-1), self._mine.view(-1), name).wait()
        return (self._axis.size - 1) * self._mine.nbytes

    def any_of(self, flags: Tensor, name: str) -> Tensor:
        """Where any host has a flag."""
        everyone = torch.empty(self._axis.size * len(flags), dtype=torch.uint8)
        self._axis.all_gather_start(everyone, flags.to(torch.uint8), name).wait()
        return everyone.view(self._axis.size, -1).amax(0)


def _joined(shares: Sequence[range]) -> range:
    """Consecutive ranges as one; those without slices do not count."""
    there = [share for share in shares if share]
    return range(there[0].start, there[-1].stop) if there else range(0)
