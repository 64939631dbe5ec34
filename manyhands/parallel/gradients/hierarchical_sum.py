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

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.comm.axis import Axis, Pending
from manyhands.comm.shared_memory import Plane
from manyhands.parallel.gradients.slice_tree import Node, nodes_of, program
from manyhands.parallel.model.flat_layout import Stretch

__all__ = ["AcrossHosts", "Arrangement", "Departures", "ExactParcel", "Parcel"]


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


class Arrangement(NamedTuple):
    """How the slices of a step are added up: on each host first, as far as its nodes of the slice tree go."""

    rows: Sequence[int]
    """Where this host's rows are."""
    programs: Sequence[bytes]
    """From those rows to each of this host's nodes."""
    program: bytes
    """From all hosts' nodes to the sum."""
    nodes: Sequence[int]
    """How many each host has; one without a slice has none."""


class Parcel(ABC):
    """A bucket of this worker's part. In a step: `send`; when all are sent, `answer`; when all are answered, `receive`.

    A parcel lives as long as the layout, whatever its place in the order.
    """

    number: int
    """Its place in the order of all workers' buckets."""
    num_bytes: int
    """What it takes to send it to the other hosts."""

    def __init__(self, bucket: Stretch, across: AcrossHosts) -> None:
        self.bucket, self._axis, self._plane = bucket, across.axis, across.plane

    def arrange(self, how: Arrangement) -> None:
        self._how = how

    @abstractmethod
    def send(self, name: str, missing: Collection[int]) -> None:
        """Sum this host's rows, and let it go. This worker has no gradient for the parameters that are `missing`."""

    @abstractmethod
    def answer(self, name: str) -> None:
        """Whatever has to travel once more."""

    @abstractmethod
    def receive(self, target: int) -> None:
        """Finish the sum, in the row at `target`."""

    def _sum_rows(self, along: bytes, target: Tensor) -> None:
        elements = self.bucket.elements
        sources = [row + 4 * elements.start for row in self._how.rows]
        self._plane.sum_at(target.data_ptr(), sources, len(elements), torch.float32, along)


class ExactParcel(Parcel):
    """Every host's nodes go to every host, so that the sum is the same whatever the hosts."""

    def __init__(self, bucket: Stretch, across: AcrossHosts) -> None:
        super().__init__(bucket, across)
        self._nodes = torch.zeros(0, len(bucket.elements))

    def arrange(self, how: Arrangement) -> None:
        super().arrange(how)
        if len(self._nodes) != max(how.nodes):
            self._nodes = torch.zeros(max(how.nodes), len(self.bucket.elements))
            self._everyone = torch.zeros(self._axis.size, *self._nodes.shape)
        self.num_bytes = (self._axis.size - 1) * self._nodes.nbytes

    def send(self, name: str, missing: Collection[int]) -> None:
        for along, target in zip(self._how.programs, self._nodes, strict=False):
            self._sum_rows(along, target)
        self.pending = self._axis.all_gather_start(self._everyone.view(-1), self._nodes.view(-1), name)

    def answer(self, name: str) -> None:
        """Nothing: everybody has everything."""

    def receive(self, target: int) -> None:
        self.pending.wait()
        elements = self.bucket.elements
        nodes = [node for rows, count in zip(self._everyone, self._how.nodes, strict=True) for node in rows[:count]]
        sources = [node.data_ptr() for node in nodes]
        self._plane.sum_at(target + 4 * elements.start, sources, len(elements), torch.float32, self._how.program)


class Departures:
    """The buckets of one layout of fp32 gradients. Per step: `begin`; `deposited` and `depart`, often; `arrive`.

    An owner's buckets start in their order, however they become complete: all ends of a connection must start the same.
    """

    def __init__(
        self,
        across: AcrossHosts,
        buckets: Sequence[Stretch],
        pack: Callable[[Stretch, AcrossHosts], Parcel] = ExactParcel,
    ) -> None:
        """`buckets` as all workers of a host have them, in the order in which gradients are expected."""
        self._axis, self._plane, self._across = across.axis, across.plane, across
        self.missing: Collection[int] = ()
        """Parameters for which this worker has no gradient in the step, as far as it knows."""
        ours = [bucket for bucket in buckets if bucket.owner == self._plane.rank]
        self._parcel_of = {bucket.elements: pack(bucket, across) for bucket in ours}
        self._depart_in(buckets)

    def _depart_in(self, order: Sequence[Stretch]) -> None:
        self.order, self.parcels = list(order), list[Parcel]()
        for number, bucket in enumerate(order):
            if bucket.owner == self._plane.rank:
                parcel = self._parcel_of[bucket.elements]
                parcel.number = number
                self.parcels.append(parcel)

    @property
    def num_bytes(self) -> int:
        return sum(parcel.num_bytes for parcel in self.parcels)

    def arrange(self, shares: Sequence[range], count: int, held: Sequence[Node], rows: Sequence[int]) -> None:
        """For these shares of `count` slices: this host's rows are at `rows`, and have the nodes `held`, in order."""
        world, hosts = self._plane.world, range(self._axis.size)
        nodes = [nodes_of(_joined(shares[host * world : (host + 1) * world]), count) for host in hosts]
        how = Arrangement(
            rows,
            [program(held, count, top=node) for node in nodes[self._axis.rank]],
            program([node for of_host in nodes for node in of_host], count),
            list(map(len, nodes)),
        )
        for parcel in self.parcels:
            parcel.arrange(how)

    def begin(self, name: str) -> None:
        self._name, self._base = name, self._plane.num_posts
        self._departed, self.missing = 0, ()

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
        for parcel in self.parcels[self._departed :]:
            needed = self._base + parcel.number + 1
            if wait:
                self._plane.wait_posted(needed, self._name)
            elif not self._plane.all_posted(needed):
                return
            parcel.send(self._name, self.missing)
            self._departed += 1

    def arrive(self, target: int) -> None:
        """Finish the sums of this worker's part, in the row at `target`."""
        for parcel in self.parcels:
            parcel.answer(self._name)
        for parcel in self.parcels:
            parcel.receive(target)

    def settle(self, arrival: Sequence[int]) -> None:
        """Go by the order in which the first worker's gradients arrived; those it has not seen come last."""
        when = {index: time for time, index in enumerate(arrival)}
        last = [max(when.get(index, len(when)) for index in bucket.members) for bucket in self.order]
        agreed = torch.tensor(sorted(range(len(last)), key=last.__getitem__), dtype=torch.int64)
        self._across.agree_(agreed, "order of gradients")
        self._depart_in([self.order[number] for number in agreed.tolist()])


def _joined(shares: Sequence[range]) -> range:
    """Consecutive ranges as one; those without slices do not count."""
    there = [share for share in shares if share]
    return range(there[0].start, there[-1].stop) if there else range(0)
