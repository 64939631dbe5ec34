"""Sums between hosts, each worker for its part: shared memory inside a host, a network between them.

The workers of a host have consecutive slices, so a host holds few nodes of the slice tree, whatever its number of
workers. Each worker sums its part of those nodes from the rows of its host, and exchanges them with the worker in the
same place of every other host. A link so carries each gradient once, not once per worker.

This happens while backward still runs. Parts are cut into buckets, which leave in one order that every worker of every
host knows. A worker posts how many of them its row holds. The owner of the next one looks whenever a gradient of its
own arrives, and sends it off as soon as all workers of its host have it: nobody waits before backward has ended. Start
reading at `Departures`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.comm.axis import Axis, Pending
from manyhands.comm.shared_memory import Plane
from manyhands.parallel.flat import Stretch
from manyhands.parallel.tree import Node, nodes_of, program

__all__ = ["AcrossHosts", "Departures"]


class AcrossHosts(NamedTuple):
    """`axis` has the workers in this one's place, one per host; every host has as many workers as `plane` has ranks."""

    axis: Axis
    plane: Plane

    @property
    def first_rank(self) -> int:
        """Of this host's workers."""
        return self.axis.rank * self.plane.world

    def agree_(self, numbers: Tensor, name: str) -> None:
        """Give every worker of every host those of the first."""
        self.plane.broadcast_(numbers, name)
        self.axis.broadcast_([numbers], name)

    def any_start(self, flags: Tensor, name: str) -> tuple[Pending, Tensor]:
        """On the way to where any host has a flag: a column each, one row per host."""
        everyone = torch.empty(self.axis.size, len(flags), dtype=torch.uint8)
        return self.axis.all_gather_start(everyone.view(-1), flags, name), everyone


class Departures:
    """The buckets of one layout of fp32 gradients. Per step: `begin`; `deposited` and `depart`, often; `arrive`.

    An owner's buckets start in their order, however they become complete: all ends of a connection must start the same.
    """

    def __init__(self, across: AcrossHosts, buckets: Sequence[Stretch]) -> None:
        """`buckets` as all workers of a host have them, in the order in which gradients are expected."""
        self._axis, self._plane, self._across = across.axis, across.plane, across
        self._num_nodes = 0
        self._depart_in(buckets)

    def _depart_in(self, order: Sequence[Stretch]) -> None:
        self.order = list(order)
        self._mine = [_Mine(number, bucket.elements) for number, bucket in enumerate(order) if self._is_ours(bucket)]
        self._make_room()

    def _is_ours(self, bucket: Stretch) -> bool:
        return bucket.owner == self._plane.rank

    def _make_room(self) -> None:
        for mine in self._mine:
            mine.nodes = torch.zeros(self._num_nodes, len(mine.elements))
            mine.everyone = torch.zeros(self._axis.size, self._num_nodes, len(mine.elements))
        self.num_bytes = (self._axis.size - 1) * sum(mine.nodes.nbytes for mine in self._mine)

    def arrange(self, shares: Sequence[range], count: int, held: Sequence[Node], rows: Sequence[int]) -> None:
        """For these shares of `count` slices: this host's rows are at `rows`, and have the nodes `held`, in order."""
        world, hosts = self._plane.world, range(self._axis.size)
        nodes = [nodes_of(_joined(shares[host * world : (host + 1) * world]), count) for host in hosts]
        self._rows = rows
        self._programs = [program(held, count, top=node) for node in nodes[self._axis.rank]]
        self._program = program([node for of_host in nodes for node in of_host], count)
        self._places = [(host, place) for host in hosts for place in range(len(nodes[host]))]
        if max(map(len, nodes)) != self._num_nodes:
            self._num_nodes = max(map(len, nodes))
            self._make_room()

    def begin(self, name: str) -> None:
        self._name, self._base = name, self._plane.num_posts
        self._departed = 0

    @property
    def awaited(self) -> Stretch | None:
        """The bucket that this worker deposits next."""
        number = self._plane.num_posts - self._base
        return self.order[number] if number < len(self.order) else None

    def deposited(self, everything: bool = False) -> None:
        """This worker's row holds the bucket that was `awaited`, or all of them."""
        self._plane.post(len(self.order) - (self._plane.num_posts - self._base) if everything else 1)

    def depart(self, *, wait: bool = False) -> None:
        """Send those of this worker's buckets that its host has deposited; with `wait`, all of them."""
        for mine in self._mine[self._departed :]:
            needed = self._base + mine.number + 1
            if wait:
                self._plane.wait_posted(needed, self._name)
            elif not self._plane.all_posted(needed):
                return
            self._send(mine)
            self._departed += 1

    def _send(self, mine: _Mine) -> None:
        sources = [row + 4 * mine.elements.start for row in self._rows]
        for along, target in zip(self._programs, mine.nodes, strict=False):
            self._plane.sum_at(target.data_ptr(), sources, len(mine.elements), torch.float32, along)
        mine.pending = self._axis.all_gather_start(mine.everyone.view(-1), mine.nodes.view(-1), self._name)

    def arrive(self, target: int) -> None:
        """Finish the sums of this worker's part, in the row at `target`."""
        for mine in self._mine:
            mine.pending.wait()
            sources = [mine.everyone[place].data_ptr() for place in self._places]
            at = target + 4 * mine.elements.start
            self._plane.sum_at(at, sources, len(mine.elements), torch.float32, self._program)

    def settle(self, arrival: Sequence[int]) -> None:
        """Go by the order in which the first worker's gradients arrived; those it has not seen come last."""
        when = {index: time for time, index in enumerate(arrival)}
        last = [max(when.get(index, len(when)) for index in bucket.members) for bucket in self.order]
        agreed = torch.tensor(sorted(range(len(last)), key=last.__getitem__), dtype=torch.int64)
        self._across.agree_(agreed, "order of gradients")
        self._depart_in([self.order[number] for number in agreed.tolist()])


class _Mine:
    """A bucket of this worker's part, and its place in the order."""

    nodes: Tensor
    everyone: Tensor
    pending: Pending

    def __init__(self, number: int, elements: range) -> None:
        self.number, self.elements = number, elements


def _joined(shares: Sequence[range]) -> range:
    """Consecutive ranges as one; those without slices do not count."""
    there = [share for share in shares if share]
    return range(there[0].start, there[-1].stop) if there else range(0)
