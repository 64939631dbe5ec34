"""The gradient of the whole batch, where the ranks share memory: rows that everybody sees, and sums along the tree.

Each rank has a row per node of the slice tree that it holds (one, for the usual number of slices), as long as all
gradients together. While backward of its last slice runs, fresh gradients are copied there; the others' rows are never
copied at all. `finish` is a meeting: afterwards every rank may read every row, and knows which parameters have a
gradient anywhere. Then each rank sums its own part: on its way into new weights (`fused_shared_weights`), or for the
ranks that own the tensors (`total`, see `owner_updates`), or for everybody's `.grad` (`collect`), for optimizers that
every rank runs in full. With several hosts, a rank's part leaves for the others in buckets while backward runs
(`hierarchical_sum`), and is summed when `finish` returns.

The same calls as `GradientSum`, which does this over a network. Start reading at `SharedGradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from manyhands.comm.codecs import Codec
from manyhands.comm.host_memory import Segment
from manyhands.comm.peer_waits import Waiting
from manyhands.comm.shared_memory import DTYPES, Plane
from manyhands.errors import TrainingFailed
from manyhands.parallel.gradients.buffer_headers import SeatNotes
from manyhands.parallel.gradients.gradient_norm import blocks_of, norm_of, squares_of
from manyhands.parallel.gradients.hierarchical_compressed_sum import CodedDepartures
from manyhands.parallel.gradients.hierarchical_sum import AcrossHosts, Departures
from manyhands.parallel.gradients.network_sum import Gradients, add_lists, take
from manyhands.parallel.gradients.slice_tree import ONE, Node, Stack, nodes_of, program
from manyhands.parallel.model.flat_layout import Flat, lay_out
from manyhands.torch_private import foreach_copy_

__all__ = ["AT_ONCE_BYTES", "SharedGradients", "summable"]

# From this size on a gradient is copied as soon as it is there, while it is in a cache; smaller ones all at the end.
AT_ONCE_BYTES = 2**18


def summable(params: Sequence[Tensor]) -> bool:
    """Whether sums of these can be made in shared memory."""
    return bool(params) and all(param.dtype in DTYPES and param.device.type == "cpu" for param in params)


class SharedGradients:
    """Per-slice gradients of `params` in memory of all ranks; the same bits for every division of the slices.

    Rows belong to slots: rank r's are those of `slots[r]`. A step is divided into seats, one per rank at its begin. If
    ranks are lost in the step, `move` goes on with the others on a new plane; the division stays, and whoever takes a
    lost rank's seat fills its rows in its place.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        plane: Plane,
        memory: Callable[[str, int], Segment],
        across: AcrossHosts | None = None,
        bucket_bytes: int = 2**22,
        *,
        codec: Codec | None = None,
        slots: Sequence[int] | None = None,
    ) -> None:
        """With `across`, which wants fp32 throughout, `plane` has this host's ranks only; sums travel through `codec`.

        `slots` are given where ranks may be lost: then nothing that a step was given is overwritten before its end.
        """
        self.params, self._plane, self._memory, self._across = list(params), plane, memory, across
        self._first_rank = across.first_rank if across is not None else 0
        self.flat: Flat = lay_out(self.params)
        self._row_bytes = -(-self.flat.num_bytes // 4096) * 4096
        self.keeps_rows = slots is not None
        self._slots = list(slots) if slots is not None else list(range(plane.world))
        self._segments: dict[str, Segment] = {}
        self._views: dict[str, list[Tensor]] = {}
        for slot in self._slots:  # where there is no memory, every rank knows it now
            self._row(slot, 0)
        if self.keeps_rows:
            self._segment("sums", self._row_bytes)
        self.notes = SeatNotes(len(self.params), self._segment)
        self._shares: Sequence[range] | None = None
        self._overlapping = False
        self.bytes_sent = 0
        self._small = [i for i, param in enumerate(self.params) if param.nbytes < AT_ONCE_BYTES]
        self._large = set(range(len(self.params))) - set(self._small)
        self._arrival: list[int] | None = None
        self._hooks: list[RemovableHandle] = []
        if across is None:
            self._departures: Departures | None = None
            self._hook(self._large)
        else:
            self._departures = self._new_departures(across, bucket_bytes, codec)
            self._arrival = []  # of the first step's gradients
            self._hook(range(len(self.params)))

    def _new_departures(self, across: AcrossHosts, bucket_bytes: int, codec: Codec | None) -> Departures:
        if codec is not None:
            scratch = self._row(self._slots[0], 0)
            return CodedDepartures(across, self.params, self.flat, bucket_bytes, codec, scratch)
        (section,) = self.flat.sections
        return Departures(across, self.flat.stretches(section, self._plane.world, bucket_bytes))

    @property
    def coded(self) -> CodedDepartures | None:
        return self._departures if isinstance(self._departures, CodedDepartures) else None

    def _hook(self, indices: Iterable[int]) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            self.params[i].register_post_accumulate_grad_hook(self._when_there(i))  # type: ignore[no-untyped-call]
            for i in indices
        ]

    @property
    def waits(self) -> list[Waiting]:
        """Where waiting for other ranks is added up."""
        return [self._plane.waiting] if self._across is None else [self._plane.waiting, self._across.axis.waiting]

    def begin(self, count: int, shares: Sequence[range], name: str) -> None:
        """Start a step of `count` slices, of which rank r computes `shares[r]`."""
        self._count, self._name = count, name
        self.notes.begin()
        if shares is not self._shares:
            self._set_shares(shares)
        if self._departures is not None:
            self._departures.begin(f"gradients of {name}")
        self.take_seat(self._plane.rank)

    def take_seat(self, seat: int) -> None:
        """What follows is done for this seat of the step: at its begin, this rank's own."""
        self._seat, self._mine = seat, self._shares_here[seat]
        self._stack: Stack[Gradients] = Stack(self._count, add=add_lists)
        self._message = b""
        self._deposited: set[int] = set()
        self._left = False
        for param in self.params:
            param.grad = None

    def _set_shares(self, shares: Sequence[range]) -> None:
        self._shares, self._seats = shares, list(self._slots)
        self._shares_here = list(shares[self._first_rank : self._first_rank + self._plane.world])
        self._nodes = [nodes_of(share, self._count) for share in self._shares_here]
        held = [
            (slot, level, node)
            for slot, nodes in zip(self._seats, self._nodes, strict=True)
            for level, node in enumerate(nodes)
        ]
        ordered: list[Node] = [node for _, _, node in held]
        rows = tuple(self._row(slot, level).address for slot, level, _ in held)
        first_slot, first_level, _ = held[0] if held else (self._seats[0], 0, None)  # a host may be without a slice
        total = self._segment("sums", self._row_bytes) if self.keeps_rows else self._row(first_slot, first_level)
        self._total_row, self._total = total.address, self.flat.views(self.params, total)
        if self._departures is None:
            self.program, self.rows = program(ordered, self._count), rows
        else:
            self._departures.arrange(shares, self._count, ordered, rows)
            self.program, self.rows = ONE, (self._total_row,)

    # ---- memory ----

    def _segment(self, name: str, num_bytes: int) -> Segment:
        if name not in self._segments:
            self._segments[name] = self._memory(name, num_bytes)
        return self._segments[name]

    def _row(self, slot: int, level: int) -> Segment:
        return self._segment(f"gradients {level} of slot {slot}", self._row_bytes)

    def _row_views(self, slot: int, level: int) -> list[Tensor]:
        row = self._row(slot, level)
        name = f"{level} {slot}"
        if name not in self._views:
            self._views[name] = self.flat.views(self.params, row)
        return self._views[name]

    def addresses(self, byte: int) -> list[int]:
        """Where every row has its value `byte` bytes from its start, in the order of the program."""
        return [row + byte for row in self.rows]

    def total_address(self, byte: int) -> int:
        """The same of the row that has the sums, after `total`."""
        return self._total_row + byte

    # ---- small messages that come along ----

    def can_carry(self, num_bytes: int) -> bool:
        """Whether every rank's message of at most so many bytes can be seen by all after `finish`: all on this host."""
        self.notes.make_room(self._seats, max(map(len, self._nodes)), num_bytes)
        return self._across is None

    def carry(self, message: bytes) -> None:
        self._message = message

    def carried(self) -> list[bytes]:
        """Every seat's message, followed by zeros; after `finish`."""
        return self.notes.messages()

    # ---- going on without a rank ----

    def move(self, plane: Plane, slots: Sequence[int]) -> None:
        """From now on these ranks, on this plane. A step that is under way keeps its division."""
        assert self._across is None
        self._plane, self._slots, self._shares = plane, list(slots), None

    def lost_seats(self) -> list[int]:
        """Seats of the step under way whose rank is no longer there."""
        return [seat for seat, slot in enumerate(self._seats) if slot not in self._slots]

    # ---- backward ----

    def before_backward(self, v: int) -> None:
        """Backward of slice `v` comes next; slices come in ascending order."""
        self._overlapping = v == self._mine[-1]
        if self._overlapping:
            below, slot = list(self._stack.values()), self._seats[self._seat]
            level = len(self._nodes[self._seat]) - 1
            self._held, self._merging = below[:level], below[level:]
            self._target = self._row_views(slot, level)
            self._present = [True] * len(self.params)
            for lower, gradients in enumerate(self._held):
                for view, grad in zip(self._row_views(slot, lower), gradients, strict=True):
                    _copy(view, grad)

    def _when_there(self, index: int) -> Callable[[Tensor], None]:
        def arrived(param: Tensor) -> None:
            if not self._overlapping:
                return
            if index in self._deposited:
                raise _second_instalment()
            if index in self._large:
                self._deposit(index)
            if self._arrival is not None:
                self._arrival.append(index)
            if self._departures is not None:
                self._move_on(self._departures)

        return arrived

    def _move_on(self, departures: Departures) -> None:
        """Complete the buckets that can be, in their order, and send those that all ranks of this host have."""
        while (bucket := departures.awaited) is not None:
            rest = [i for i in bucket.members if i not in self._deposited]
            if any(self.params[i].grad is None for i in rest):
                break
            self._deposit_all(rest)
            departures.deposited()
        departures.depart()

    def after_backward(self, v: int) -> None:
        if not self._overlapping:
            self._stack.push(v, [take(param) for param in self.params])
            return
        self._overlapping = False
        if any(self.params[index].grad is not None for index in self._deposited):
            raise _second_instalment()
        everything = range(len(self.params))
        self._deposit_all([i for i in everything if i not in self._deposited] if self._deposited else everything)
        if self._departures is not None:
            self._departures.missing = [i for i, there in enumerate(self._present) if not there]
            self._departures.deposited(everything=True)
            self._departures.depart()

    def _deposit_all(self, indices: Sequence[int]) -> None:
        """In one call for all of them, where every one has a gradient and there is nothing to fold."""
        whole = len(indices) == len(self.params)
        params = self.params if whole else [self.params[i] for i in indices]
        grads = [param.grad for param in params]
        if not grads or self._merging or any(grad is None or grad.is_sparse for grad in grads):
            for index in indices:
                self._deposit(index)
            return
        foreach_copy_(self._target if whole else [self._target[i] for i in indices], grads)
        self._deposited.update(indices)
        for param in params:
            param.grad = None

    def _deposit(self, index: int) -> None:
        """Take the last slice's gradient, fold it into its node, and put that into the row."""
        self._deposited.add(index)
        grad = take(self.params[index])
        for lower in reversed(self._merging):
            left = lower[index]
            if left is not None:
                grad = left if grad is None else left.add_(grad)
        self._present[index] = grad is not None
        _copy(self._target[index], grad)

    # ---- after backward ----

    def leave_seat(self) -> None:
        """All of this seat's slices are done."""
        if self._left:
            return
        self._left = True
        if not self.notes.has_room:
            self.can_carry(len(self._message))
        rows = [[grad is not None for grad in gradients] for gradients in self._held] if self._mine else []
        rows += [self._present] if self._mine else []
        self.notes.write(self._seat, rows, self._message)

    def finish(self) -> None:
        """Meet the others: every row and message is there."""
        self.leave_seat()
        if self._departures is not None:
            if not self._mine:
                self._departures.missing = range(len(self.params))
            self._departures.deposited(everything=True)  # a rank without a slice has none to wait for
            self._departures.depart(wait=True)
        self._plane.meet(f"gradients of {self._name}")
        self.present = self.notes.present([len(nodes) for nodes in self._nodes])
        if self._across is not None and self._departures is not None:
            self._arrive(self._across, self._departures)

    def _arrive(self, across: AcrossHosts, departures: Departures) -> None:
        flags = torch.zeros(len(self.params), dtype=torch.uint8)
        flags[self.present] = 1
        pending, everyone = across.any_start(flags, f"presence in {self._name}")
        departures.arrive(self._total_row)
        pending.wait()
        self.present = everyone.amax(0).nonzero().flatten().tolist()
        if self.coded is not None:
            self.coded.spare(self.present)
        self.bytes_sent = departures.num_bytes
        if self._arrival is not None:
            departures.settle(self._arrival)
            self._hook_last_of_each(departures, self._arrival)
            self._arrival = None

    def _hook_last_of_each(self, departures: Departures, arrival: list[int]) -> None:
        """A hook for each of many small parameters would take longer than copying them."""
        when = {index: time for time, index in enumerate(arrival)}
        last = {max(bucket.members, key=lambda i: when.get(i, -1)) for bucket in departures.order}
        self._hook(self._large | last)

    def total(self) -> list[Tensor]:
        """The sums, in shared memory, by parameter. Every rank sums its part; all of it is there on return."""
        rank, world = self._plane.rank, self._plane.world
        for section in self.flat.sections if self._departures is None else ():  # what has arrived is summed
            part = section.part(rank, world)
            sources = self.addresses(section.start_byte + part.start * section.dtype.itemsize)
            target = self.total_address(section.start_byte + part.start * section.dtype.itemsize)
            self._plane.sum_at(target, sources, len(part), section.dtype, self.program)
        self._plane.meet(f"sums of {self._name}")
        return self._total

    def norm(self, total: Sequence[Tensor], factor: float) -> float:
        """Of the sums, scaled by a factor; ranks share the work."""
        blocks = list(blocks_of(total[place] for place in self.present))
        rank, world = self._plane.rank, self._plane.world
        mine = blocks[len(blocks) * rank // world : len(blocks) * (rank + 1) // world]
        squares = torch.zeros(-(-len(blocks) // world), dtype=torch.float64)
        squares[: len(mine)] = squares_of([block * factor for block in mine])
        everyone = torch.empty(world * len(squares), dtype=torch.float64)
        self._plane.all_gather(everyone, squares, "norm")
        sizes = [len(blocks) * (r + 1) // world - len(blocks) * r // world for r in range(world)]
        return norm_of(torch.cat([row[:size] for row, size in zip(everyone.view(world, -1), sizes, strict=True)]))

    def collect(self) -> None:
        """Leave the sums in `.grad`, in memory of this rank's own; None where no slice had a gradient."""
        total = self.total()
        for index in self.present:
            self.params[index].grad = total[index].clone()
        self._plane.meet(f"copies of {self._name}")  # until then the next backward must not write to the rows

    @property
    def segments(self) -> list[Segment]:
        return list(self._segments.values())

    def leave(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def close(self) -> None:
        """The same, and give the memory back once everybody is here."""
        self.leave()
        self._plane.meet("new layout")
        for segment in self._segments.values():
            if self._plane.rank == 0:
                segment.free()


def _second_instalment() -> TrainingFailed:
    return TrainingFailed(
        "A parameter received gradients twice in one backward pass, the second after the first was used.",
        fix=["torch.utils.checkpoint(..., use_reentrant=False)"],
    )


def _copy(view: Tensor, grad: Tensor | None) -> None:
    view.zero_() if grad is None else view.copy_(grad)
