"""Hierarchical sums, divided over the workers: shared memory within a host, a network between hosts.

The workers of a host have consecutive slices, so a host holds few nodes of the slice tree, for any number of workers.
Each worker sums its part of those nodes from the gradient buffers of its host, and exchanges them with the worker of
the same local rank on every other host. So a link carries each gradient once, not once per worker. Through a codec, the
host's sum is sent: it is rounded once, for any number of workers.

This happens while backward still runs. Parts are cut into buckets, which are sent in one order that every worker of
every host knows. A worker posts how many of them its buffer holds. Whenever one of its gradients arrives, the owner of
the next bucket checks these counts, and sends it as soon as all workers of its host have it: no worker waits before
backward has ended. Start reading at `HierarchicalSum`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyhands.comm.axis import Axis, Pending
from manyhands.comm.codecs import Codec
from manyhands.comm.host_memory import Segment
from manyhands.comm.shared_memory import Plane
from manyhands.parallel.gradients.compressed_all_reduce import CompressedAllReduce, gather_rows, most_numel
from manyhands.parallel.gradients.interface import Residuals
from manyhands.parallel.gradients.slice_tree import ONE, Node, nodes_of, program
from manyhands.parallel.model.flat_layout import Flat, FlatRange, in_memory_order, strides

__all__ = ["HierarchicalSum", "HostAxis", "HostBucket"]


class HostAxis(NamedTuple):
    """`axis` has the workers with this worker's local rank, one per host; `plane` has the workers of this host.

    All hosts have the same number of workers.
    """

    axis: Axis
    plane: Plane

    @property
    def first_rank(self) -> int:
        """The first rank of this host's workers."""
        return self.axis.rank * self.plane.world

    def agree_(self, numbers: Tensor, name: str) -> None:
        """Broadcast the first worker's numbers to every worker of every host."""
        self.plane.broadcast_(numbers, name)
        self.axis.broadcast_([numbers], name)

    def any_start(self, flags: Tensor, name: str) -> tuple[Pending, Tensor]:
        """Start gathering every host's flags: a row per host."""
        gathered = torch.empty(self.axis.size, len(flags), dtype=torch.uint8)
        return self.axis.all_gather_start(gathered.view(-1), flags, name), gathered


class Arrangement(NamedTuple):
    """How the slices of a step are summed: first within each host, then over what hosts send each other."""

    buffers: Sequence[int]
    """Addresses of this host's gradient buffers."""
    to_send: Sequence[bytes]
    """Programs from those buffers to what this host sends."""
    to_sum: bytes
    """From what all hosts have sent to the sum."""
    num_nodes: Sequence[int]
    """How many nodes of the slice tree each host has; one without a slice has none."""


class NodeAllGather:
    """Sends every host's nodes of the slice tree to every host, so that the sum does not depend on the hosts.

    It has the methods of `CompressedAllReduce`.
    """

    def __init__(self, numel: int, axis: Axis) -> None:
        self._axis, self._nodes, self.residual = axis, torch.zeros(0, numel), torch.zeros(0)

    @property
    def rows(self) -> Sequence[Tensor]:
        return self._nodes.unbind()

    def arrange(self, num_nodes: Sequence[int]) -> None:
        self._num_nodes = num_nodes
        if len(self._nodes) != max(num_nodes):
            self._nodes = self._nodes.new_zeros(max(num_nodes), self._nodes.shape[1])
            self._gathered = self._nodes.new_zeros(self._axis.size, *self._nodes.shape)
        self.num_bytes = (self._axis.size - 1) * self._nodes.nbytes

    def send(self, name: str) -> None:
        self.pending = self._axis.all_gather_start(self._gathered.view(-1), self._nodes.view(-1), name)

    def receive(self) -> None: ...

    def send_sum(self, name: str) -> None:
        """Nothing: every host adds up all nodes."""

    def receive_sum(self) -> list[Tensor]:
        """All hosts' nodes, in slice order."""
        self.pending.wait()
        return [node for nodes, count in zip(self._gathered, self._num_nodes, strict=True) for node in nodes[:count]]


class HostBucket:
    """Some of this worker's part of the gradients, and its transfer to the other hosts.

    In a step: `send`; when all are sent, `send_sum`; when all of those are, `receive`. It lives as long as the layout,
    even if its number in the order changes.
    """

    number: int
    """In the order of all workers' buckets."""

    def __init__(
        self,
        elements: range,
        plane: Plane,
        transfer: NodeAllGather | CompressedAllReduce,
        spans: Mapping[int, range],
    ) -> None:
        """`spans`: the elements of each parameter that has a residual, by its index."""
        self.elements, self._plane, self.transfer, self.spans = elements, plane, transfer, spans
        self._set_aside: dict[int, Tensor] = {}

    def residual_of(self, index: int) -> Tensor:
        """The part of this parameter's residual that is in the bucket; the next step changes it."""
        span, start = self.spans[index], self.elements.start
        return self.transfer.residual[span.start - start : span.stop - start]

    def arrange(self, how: Arrangement) -> None:
        self._how = how
        self.transfer.arrange(how.num_nodes)

    def send(self, name: str, missing: Collection[int]) -> None:
        """Sum this host's buffers, and send that. This worker has no gradient for the parameters that are `missing`."""
        start = 4 * self.elements.start
        for along, row in zip(self._how.to_send, self.transfer.rows, strict=False):
            self._sum(row.data_ptr(), [buffer + start for buffer in self._how.buffers], along)
        # Perhaps no worker has a gradient for these. Then they are not updated, and their residuals must be kept.
        self._set_aside = {i: self.residual_of(i).clone() for i in self.spans if i in missing}
        self.transfer.send(name)

    def send_sum(self, name: str) -> None:
        self.transfer.receive()
        self.transfer.send_sum(name)

    def receive(self, target: int) -> None:
        """Finish the sum, in the gradient buffer at `target`."""
        sources = [row.data_ptr() for row in self.transfer.receive_sum()]
        self._sum(target + 4 * self.elements.start, sources, self._how.to_sum)

    def _sum(self, target: int, sources: Sequence[int], along: bytes) -> None:
        self._plane.sum_at(target, sources, len(self.elements), torch.float32, along)

    def keep_residuals(self, present: Collection[int]) -> None:
        """Only these parameters have a gradient on any host."""
        for index, residual in self._set_aside.items():
            if index not in present:
                self.residual_of(index).copy_(residual)


class HierarchicalSum:
    """The buckets of one layout of fp32 gradients. Per step: `begin`; `deposited` and `depart`, often; `arrive`.

    An owner sends its buckets in order, even if a later one is complete first: both ends of a connection must start the
    same transfers. With a codec, it has `Residuals`, by the parameters' indices in `params`: one number per value and
    host; each worker has those of its part.
    """

    settled_order: list[int] | None = None
    """Always None: values are rounded in blocks of the layout, which do not depend on the order of the buckets."""

    def __init__(
        self,
        across: HostAxis,
        params: Sequence[nn.Parameter],
        flat: Flat,
        bucket_bytes: int,
        codec: Codec | None,
        scratch: Segment,
    ) -> None:
        """`scratch` is as long as a gradient buffer, shared by the host's workers, and free for use between steps."""
        self._across, self._axis, self._plane = across, across.axis, across.plane
        self.params, self._flat, self._codec, self._scratch = params, flat, codec, scratch
        self._feeds_back = codec is not None and codec.feeds_back
        self.missing: Collection[int] = ()
        """Parameters for which this worker has no gradient in the step, as far as it knows."""
        (section,) = flat.sections
        most_bytes = bucket_bytes if codec is None else 4 * most_numel(self._axis.size, bucket_bytes)
        # The same on all workers of a host, in the order in which gradients are expected.
        ranges = flat.stretches(section, self._plane.world, most_bytes)
        self._bucket_of = {one.elements: self._new_bucket(one) for one in ranges if one.owner == self._plane.rank}
        self._depart_in(ranges)

    def _new_bucket(self, bucket: FlatRange) -> HostBucket:
        elements, axis = bucket.elements, self._axis
        if self._codec is None:
            return HostBucket(elements, self._plane, NodeAllGather(len(elements), axis), {})
        members = bucket.members if self._feeds_back else ()
        spans = {index: self._flat.span(index, self.params[index].numel(), elements) for index in members}
        there = {index: span for index, span in spans.items() if span}
        return HostBucket(elements, self._plane, CompressedAllReduce(len(elements), axis, self._codec), there)

    def _depart_in(self, order: Sequence[FlatRange]) -> None:
        self.order, self.buckets = list(order), list[HostBucket]()
        for number, one in enumerate(order):
            if one.owner == self._plane.rank:
                bucket = self._bucket_of[one.elements]
                bucket.number = number
                self.buckets.append(bucket)

    @property
    def num_bytes(self) -> int:
        return sum(bucket.transfer.num_bytes for bucket in self.buckets)

    def arrange(self, shares: Sequence[range], count: int, held: Sequence[Node], buffers: Sequence[int]) -> None:
        """Prepare for these shares of `count` slices: this host's `buffers` have the nodes `held`, in order."""
        world, hosts = self._plane.world, range(self._axis.size)
        nodes = [nodes_of(_joined(shares[host * world : (host + 1) * world]), count) for host in hosts]
        if self._codec is None:
            to_send = [program(held, count, top=node) for node in nodes[self._axis.rank]]
            to_sum = program([node for of_host in nodes for node in of_host], count)
        else:  # a host adds up its buffers without regard to their slices
            leaves = [(0, number) for number in range(len(buffers))]
            to_send, to_sum = [program(leaves, len(leaves))] if leaves else [], ONE
        how = Arrangement(buffers, to_send, to_sum, list(map(len, nodes)))
        for bucket in self.buckets:
            bucket.arrange(how)

    def begin(self, name: str) -> None:
        self._name, self._base = name, self._plane.num_posts
        self._departed, self.missing = 0, ()

    @property
    def awaited(self) -> FlatRange | None:
        """The bucket that this worker deposits next."""
        number = self._plane.num_posts - self._base
        return self.order[number] if number < len(self.order) else None

    def deposited(self, everything: bool = False) -> None:
        """This worker's buffer holds the bucket that was `awaited`, or all of them."""
        self._plane.post(len(self.order) - (self._plane.num_posts - self._base) if everything else 1)

    def depart(self, *, wait: bool = False) -> None:
        """Send this worker's buckets that all workers of its host have deposited; with `wait`, all buckets."""
        for bucket in self.buckets[self._departed :]:
            needed = self._base + bucket.number + 1
            if wait:
                self._plane.wait_posted(needed, self._name)
            elif not self._plane.all_posted(needed):
                return
            bucket.send(self._name, self.missing)
            self._departed += 1

    def arrive(self, target: int) -> None:
        """Finish the sums of this worker's part, in the gradient buffer at `target`."""
        for bucket in self.buckets:
            bucket.send_sum(self._name)
        for bucket in self.buckets:
            bucket.receive(target)

    def settle(self, arrival: Sequence[int]) -> None:
        """From now on, use the order in which the first worker's gradients arrived; the missing ones come last."""
        when = {index: time for time, index in enumerate(arrival)}
        last = [max(when.get(index, len(when)) for index in bucket.members) for bucket in self.order]
        agreed = torch.tensor(sorted(range(len(last)), key=last.__getitem__), dtype=torch.int64)
        self._across.agree_(agreed, "order of gradients")
        self._depart_in([self.order[number] for number in agreed.tolist()])

    # ---- residuals, where there is a codec ----

    def keep_residuals(self, present: Collection[int]) -> None:
        """Only these parameters have a gradient on any rank; keep the residuals of the others."""
        there = set(present)
        for bucket in self.buckets:
            bucket.keep_residuals(there)

    def residuals(self) -> dict[int, Tensor]:
        """Copies, zero outside of this worker's part."""
        found: dict[int, Tensor] = {}
        for bucket in self.buckets:
            for index, span in bucket.spans.items():
                if index not in found:
                    found[index] = _like(self.params[index], torch.zeros(()))
                start = self._flat.starts[index]
                in_memory_order(found[index])[span.start - start : span.stop - start] = bucket.residual_of(index)
        return found

    def gather_residuals(self) -> dict[int, Tensor]:
        """A row for each host."""
        if not self._feeds_back:
            return {}
        host = torch.frombuffer(self._scratch.buffer, dtype=torch.float32, count=self._flat.sections[0].numel)
        self._plane.barrier("residuals of a host")
        for bucket in self.buckets:
            host[bucket.elements.start : bucket.elements.stop].copy_(bucket.transfer.residual)
        self._plane.barrier("residuals of a host")
        gathered = self._gather(host) if self._plane.rank == 0 else {}
        self._plane.barrier("residuals of all hosts")
        return gathered

    def _gather(self, host: Tensor) -> dict[int, Tensor]:
        rows = gather_rows(self._axis, host, "residuals")
        return {
            index: rows.as_strided(
                (len(rows), *param.shape), (len(host), *strides(param)), self._flat.starts[index]
            ).contiguous()
            for index, param in enumerate(self.params if self._axis.rank == 0 else ())
        }

    def restore(self, order: Sequence[int] | None, rows: Mapping[int, Tensor]) -> None:
        """Of n hosts, host h has rows h, h + n, ... from now on."""
        host, hosts = self._axis.rank, self._axis.size
        self._set_residuals({index: values[host::hosts].sum(0) for index, values in rows.items()})

    def succeed(self, before: Residuals) -> None:
        """A collective of this host's workers."""
        found, world = before.residuals(), self._plane.world
        along = program([(0, rank) for rank in range(world)], world)
        index_before = {id(param): index for index, param in enumerate(before.params)}
        for index, param in enumerate(self.params if self._feeds_back else ()):
            mine = found.get(index_before.get(id(param), -1))
            total = _like(param, torch.zeros(()) if mine is None else mine)
            self._plane.all_reduce_(in_memory_order(total), along, "residuals of a host")
            self._set_residuals({index: total})

    def scale_residuals(self, factor: float) -> None:
        for bucket in self.buckets:
            bucket.transfer.residual.mul_(factor)

    def _set_residuals(self, values: Mapping[int, Tensor]) -> None:
        """Set this worker's part of the given residuals of its host."""
        for index, residual in values.items():
            start, flat = self._flat.starts[index], in_memory_order(_like(self.params[index], residual))
            for bucket in self.buckets:
                if (span := bucket.spans.get(index)) is not None:
                    bucket.residual_of(index).copy_(flat[span.start - start : span.stop - start])


def _like(param: Tensor, values: Tensor) -> Tensor:
    """The values in memory with the parameter's layout, without gaps."""
    return torch.empty_like(param, requires_grad=False).copy_(values)


def _joined(shares: Sequence[range]) -> range:
    """Consecutive ranges as one; those without slices do not count."""
    there = [share for share in shares if share]
    return range(there[0].start, there[-1].stop) if there else range(0)
