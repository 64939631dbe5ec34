"""Sums between hosts in fewer bytes: a host's workers add up in shared memory, and only that sum goes through a codec.

Each worker writes letters about its part to the workers in its place on the other hosts. So a host counts as one: its
sum is rounded once, whatever the number of its workers, and what is owed (see `compressed_sum`) is one number per
value and host, each worker having those of its part. Start reading at `CodedParcel.send`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from manyhands.comm.codecs import Codec
from manyhands.comm.host_memory import Segment
from manyhands.parallel.gradients.compressed_all_reduce import most_numel, new_letters
from manyhands.parallel.gradients.compressed_sum import CodedResiduals
from manyhands.parallel.gradients.hierarchical_sum import AcrossHosts, Arrangement, Departures, Parcel
from manyhands.parallel.gradients.slice_tree import ONE, program
from manyhands.parallel.model.flat_layout import Flat, Stretch, strides

__all__ = ["CodedDepartures"]


class CodedParcel(Parcel):
    """This host's sum of one bucket, as letters to the other hosts."""

    def __init__(self, bucket: Stretch, across: AcrossHosts, codec: Codec, spans: Mapping[int, range]) -> None:
        """`spans` tells where among the bucket's elements each of its parameters is."""
        super().__init__(bucket, across)
        self.spans, length = spans, len(bucket.elements)
        padded = -(-length // self._axis.size) * self._axis.size
        row, owed = torch.zeros(padded), torch.zeros(padded if codec.feeds_back else 0)
        self._values, self._padding, self.residual = row[:length], row[length:], owed[:length]
        self._letters = new_letters(row, owed if codec.feeds_back else None, 0, self._axis, codec)
        self.num_bytes = self._letters.num_bytes
        self._set_aside: dict[int, Tensor] = {}

    def owed_to(self, place: int) -> Tensor:
        """What is owed to this parameter, as far as it is in the bucket; it changes with the next step."""
        span, start = self.spans[place], self.bucket.elements.start
        return self.residual[span.start - start : span.stop - start]

    def arrange(self, how: Arrangement) -> None:
        super().arrange(how)
        count = len(how.rows)
        self._all_rows = program([(0, place) for place in range(count)], count) if count else b""
        self._senders = [host for host, nodes in enumerate(how.nodes) if nodes]

    def send(self, name: str, missing: Collection[int]) -> None:
        self._padding.zero_()  # where something was not finite, all of its block came back as NaN
        if self._all_rows:
            self._sum_rows(self._all_rows, self._values)
        # Perhaps nobody has a gradient for these. Then all leave them alone, and what they are owed is not spent.
        self._set_aside = {place: self.owed_to(place).clone() for place in self.spans if place in missing}
        self._letters.send(self._axis, name, self._senders, b"")

    def answer(self, name: str) -> None:
        self._letters.receive()
        self._letters.send_sum(self._axis, name)

    def receive(self, target: int) -> None:
        self._letters.receive_sum()
        elements = self.bucket.elements
        values = [self._values.data_ptr()]
        self._plane.sum_at(target + 4 * elements.start, values, len(elements), torch.float32, ONE)

    def spare(self, present: Collection[int]) -> None:
        for place, owed in self._set_aside.items():
            if place not in present:
                self.owed_to(place).copy_(owed)


class CodedDepartures(Departures):
    """`Departures` whose sums travel encoded, and what this worker owes; by the parameters' places in `params`."""

    def __init__(
        self,
        across: AcrossHosts,
        params: Sequence[nn.Parameter],
        flat: Flat,
        bucket_bytes: int,
        codec: Codec,
        scratch: Segment,
    ) -> None:
        """`scratch` is as long as a row, common to the host's workers, and theirs between steps."""
        self.params, self._flat, self._codec, self._scratch = params, flat, codec, scratch
        (section,) = flat.sections
        most_bytes = 4 * most_numel(across.axis.size, bucket_bytes)
        super().__init__(across, flat.stretches(section, across.plane.world, most_bytes), self._pack)

    def _pack(self, bucket: Stretch, across: AcrossHosts) -> CodedParcel:
        numel = {place: self.params[place].numel() for place in bucket.members}
        spans = {place: self._flat.span(place, numel[place], bucket.elements) for place in bucket.members}
        return CodedParcel(bucket, across, self._codec, {place: span for place, span in spans.items() if span})

    @property
    def _coded(self) -> list[CodedParcel]:
        return [parcel for parcel in self.parcels if isinstance(parcel, CodedParcel)]

    def spare(self, present: Collection[int]) -> None:
        """Only these have a gradient anywhere; what the others are owed stays owed."""
        there = set(present)
        for parcel in self._coded:
            parcel.spare(there)

    # ---- what is owed, as `CodedGradientSum` has it ----

    settled_order: list[int] | None = None
    """Values are rounded with those beside them in the layout, in whatever order buckets leave."""

    def residuals(self) -> dict[int, Tensor]:
        """What this worker owes: copies, zero outside of its part."""
        found: dict[int, Tensor] = {}
        for parcel in self._coded if self._codec.feeds_back else ():
            for place, span in parcel.spans.items():
                if place not in found:
                    found[place] = _like(self.params[place], torch.zeros(()))
                start = self._flat.starts[place]
                _in_memory(found[place])[span.start - start : span.stop - start] = parcel.owed_to(place)
        return found

    def gather_residuals(self) -> dict[int, Tensor]:
        """On rank 0 every host's residuals by parameter, a row for each host; nothing on the others. A collective."""
        if not self._codec.feeds_back:
            return {}
        host = torch.frombuffer(self._scratch.buffer, dtype=torch.float32, count=self._flat.sections[0].numel)
        self._plane.meet("residuals of a host")
        for parcel in self._coded:
            host[parcel.bucket.elements.start : parcel.bucket.elements.stop].copy_(parcel.residual)
        self._plane.meet("residuals of a host")
        gathered = self._gather(host) if self._plane.rank == 0 else {}
        self._plane.meet("residuals of all hosts")
        return gathered

    def _gather(self, host: Tensor) -> dict[int, Tensor]:
        hosts, length, chief = self._axis.size, len(host), self._axis.rank == 0
        rows = torch.empty(hosts if chief else 0, length)
        sizes = [length if chief else 0] * hosts
        self._axis.all_to_all_start(rows.view(-1), host, sizes, [length] + [0] * (hosts - 1), "residuals").wait()
        return {
            place: rows.as_strided(
                (hosts, *param.shape), (length, *strides(param)), self._flat.starts[place]
            ).contiguous()
            for place, param in enumerate(self.params)
            if chief
        }

    def restore(self, order: Sequence[int] | None, rows: Mapping[int, Tensor]) -> None:
        """Go on from what `gather_residuals` was. Of n hosts, host h owes rows h, h + n, ..."""
        host, hosts = self._axis.rank, self._axis.size
        self._owe({place: values[host::hosts].sum(0) for place, values in rows.items()})

    def succeed(self, before: CodedResiduals) -> None:
        """Owe what `before` owes to parameters of both. A collective of this host's workers."""
        owed, world = before.residuals(), self._plane.world
        along = program([(0, rank) for rank in range(world)], world)
        place_before = {id(param): place for place, param in enumerate(before.params)}
        for place, param in enumerate(self.params if self._codec.feeds_back else ()):
            mine = owed.get(place_before.get(id(param), -1))
            total = _like(param, torch.zeros(()) if mine is None else mine)
            self._plane.all_reduce_(_in_memory(total), along, "residuals of a host")
            self._owe({place: total})

    def scale_residuals(self, factor: float) -> None:
        """Gradients are `factor` times as large from now on."""
        for parcel in self._coded:
            parcel.residual.mul_(factor)

    def _owe(self, owed: Mapping[int, Tensor]) -> None:
        """What this host owes, of which this worker takes its part."""
        for place, total in owed.items():
            start, values = self._flat.starts[place], _in_memory(_like(self.params[place], total))
            for parcel in self._coded:
                if (span := parcel.spans.get(place)) is not None:
                    parcel.owed_to(place).copy_(values[span.start - start : span.stop - start])


def _like(param: Tensor, values: Tensor) -> Tensor:
    """The values in memory that is laid out as the parameter's is, without gaps."""
    return torch.empty_like(param, requires_grad=False).copy_(values)


def _in_memory(tensor: Tensor) -> Tensor:
    """The values of a tensor that fills its memory, in the order in which they lie there."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
