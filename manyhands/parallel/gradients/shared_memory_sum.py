"""The gradient sum where the ranks share memory: gradient buffers that every rank can read, summed along the tree.

Each rank has a buffer per node of the slice tree that it holds (one, for the usual number of slices), as long as all
gradients together. While backward of its last slice runs, fresh gradients are copied there; the buffers of other ranks
are never copied. `finish` ends with a barrier: afterwards every rank may read every buffer, and knows which parameters
have a gradient on any rank. Then each rank sums its own part: fused with the weight update (`fused_shared_weights`), or
for the ranks that own the tensors (`total`, see `owner_updates`), or for every rank's `.grad` (`collect`), for
optimizers that every rank runs in full. With several hosts, a rank's part is sent to the other hosts in buckets while
backward runs (`hierarchical_sum`), and is summed when `finish` returns. Start reading at `SharedMemorySum`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from manyhands.comm.codecs import Codec
from manyhands.comm.handed_over import count_handed_over
from manyhands.comm.host_memory import Segment
from manyhands.comm.peer_waits import Waiting
from manyhands.comm.shared_memory import DTYPES, Plane
from manyhands.errors import TrainingFailed
from manyhands.parallel.gradients.gradient_lists import Gradients, add_lists, take
from manyhands.parallel.gradients.gradient_norm import norm_blocks, norm_of, squares_of
from manyhands.parallel.gradients.hierarchical_sum import HierarchicalSum, HostAxis
from manyhands.parallel.gradients.interface import Residuals, Sum
from manyhands.parallel.gradients.slice_tree import ONE, Node, Stack, nodes_of, program
from manyhands.parallel.model.flat_layout import Flat, lay_out
from manyhands.torch_private import foreach_copy_

__all__ = ["AT_ONCE_BYTES", "BufferHeaders", "SharedMemorySum", "stamp_of", "summable"]


STAMP_BYTES = 16


def stamp_of(generation: str, step: int, redone: int) -> bytes:
    """Marks gradients of this step, of this generation's division into shares, and of attempt `redone`."""
    return hashlib.blake2s(f"{generation} {step} {redone}".encode(), digest_size=STAMP_BYTES).digest()


class BufferHeaders:
    """Header of each share's gradient buffers: which of `num_params` have a gradient, a message, and a commit stamp.

    In a step: `begin`, `make_room`, `write`; after a barrier, read.
    """

    def __init__(self, num_params: int, memory: Callable[[str, int], Segment]) -> None:
        self.stamp = bytes(STAMP_BYTES)
        """Marks a share as complete; where ranks may be lost, it is unique to the step."""
        self._num_params, self._memory, self._room = num_params, memory, 0

    def begin(self) -> None:
        self._room = 0

    @property
    def has_room(self) -> bool:
        """Whether `make_room` was called in this step."""
        return self._room > 0

    def make_room(self, slots: Sequence[int], num_buffers: int, message_bytes: int) -> None:
        """For a share of each slot, with so many buffers and a message of so many bytes at most."""
        self._present_bytes = num_buffers * self._num_params
        needed = STAMP_BYTES + self._present_bytes + message_bytes
        # The size follows from what is needed alone, so that a rank that joins later finds the same memory.
        self._room = max(4096, 1 << (needed - 1).bit_length())
        self._headers = [self._memory(f"messages of {self._room} of slot {slot}", self._room).buffer for slot in slots]

    def write(self, share: int, present: Sequence[Sequence[bool]], message: bytes) -> None:
        """Write which parameters have a gradient in each of the share's buffers, and its message."""
        data = b"".join(map(bytes, present)).ljust(self._present_bytes, b"\0") + message
        header = self._headers[share]
        header[STAMP_BYTES : STAMP_BYTES + len(data)] = data
        header[:STAMP_BYTES] = self.stamp  # last: a worker that is killed before this leaves an incomplete share

    def is_complete(self, share: int) -> bool:
        return self.has_room and self._headers[share][:STAMP_BYTES] == self.stamp

    def messages(self) -> list[bytes]:
        """The message of every share, followed by zeros."""
        start = STAMP_BYTES + self._present_bytes
        return [header[start : self._room] for header in self._headers]

    def present(self, num_buffers: Sequence[int]) -> list[int]:
        """Parameters that have a gradient in some buffer, where share s has written `num_buffers[s]`."""
        num_params, anywhere = self._num_params, [False] * self._num_params
        for header, count in zip(self._headers, num_buffers, strict=True):
            for number in range(count):
                start = STAMP_BYTES + number * num_params
                flags = header[start : start + num_params]
                if flags.count(1) == num_params:
                    return list(range(num_params))
                anywhere = [a or bool(b) for a, b in zip(anywhere, flags, strict=True)]
        return [i for i, there in enumerate(anywhere) if there]


# Gradients of this size and above are copied as soon as they arrive, while in cache; smaller ones all at the end.
AT_ONCE_BYTES = 2**18


def summable(params: Sequence[Tensor]) -> bool:
    """Whether gradients of these parameters can be summed in shared memory."""
    return bool(params) and all(param.dtype in DTYPES and param.device.type == "cpu" for param in params)


class SharedMemorySum(Sum):
    """Sums per-slice gradients of `params` in shared memory; bitwise equal for every division of the slices.

    Buffers belong to slots: rank r uses those of `slots[r]`. The slices of a step are divided into shares, one per rank
    when it begins. If ranks are lost in the step, `move` continues with the others on a new plane; the shares stay the
    same, and a rank that takes a lost rank's share fills its buffers in its place.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        plane: Plane,
        memory: Callable[[str, int], Segment],
        across: HostAxis | None = None,
        bucket_bytes: int = 2**22,
        *,
        codec: Codec | None = None,
        slots: Sequence[int] | None = None,
    ) -> None:
        """With `across`, which needs fp32 for all, `plane` has this host's ranks only; hosts send sums through `codec`.

        `slots` are given where ranks may be lost: then a step's gradients are not overwritten before it ends.
        """
        self.params, self._plane, self._memory, self._across = list(params), plane, memory, across
        self._codec = codec
        self._first_rank = across.first_rank if across is not None else 0
        self.flat: Flat = lay_out(self.params)
        self._buffer_bytes = -(-self.flat.num_bytes // 4096) * 4096
        self.keeps_rows = slots is not None
        self._slots = list(slots) if slots is not None else list(range(plane.world))
        self._segments: dict[str, Segment] = {}
        self._views: dict[str, list[Tensor]] = {}
        for slot in self._slots:  # if there is too little memory, every rank fails now
            self._buffer(slot, 0)
        if self.keeps_rows:
            self._segment("sums", self._buffer_bytes)
        self.notes = BufferHeaders(len(self.params), self._segment)
        self._shares: Sequence[range] | None = None
        self._overlapping = False
        self.bytes_sent = 0
        self._small = [i for i, param in enumerate(self.params) if param.nbytes < AT_ONCE_BYTES]
        self._large = set(range(len(self.params))) - set(self._small)
        self._arrival: list[int] | None = None
        self._hooks: list[RemovableHandle] = []
        if across is None:
            self._departures: HierarchicalSum | None = None
            self._hook(self._large)
        else:
            scratch = self._buffer(self._slots[0], 0)
            self._departures = HierarchicalSum(across, self.params, self.flat, bucket_bytes, codec, scratch)
            self._arrival = []  # the order of the first step's gradients
            self._hook(range(len(self.params)))

    @property
    def coded(self) -> Residuals | None:
        return self._departures if self._codec is not None else None

    def _hook(self, indices: Iterable[int]) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            self.params[i].register_post_accumulate_grad_hook(self._when_there(i))  # type: ignore[no-untyped-call]
            for i in indices
        ]

    @property
    def waits(self) -> list[Waiting]:
        return [self._plane.waiting] if self._across is None else [self._plane.waiting, self._across.axis.waiting]

    def begin(self, count: int, shares: Sequence[range], name: str) -> None:
        self._count, self._name = count, name
        self.notes.begin()
        if shares is not self._shares:
            self._set_shares(shares)
        if self._departures is not None:
            self._departures.begin(f"gradients of {name}")
        self.take_share(self._plane.rank)

    def take_share(self, index: int) -> None:
        """The following calls are for this share of the step; when the step begins, it is this rank's own."""
        self._share_index, self._mine = index, self._shares_here[index]
        self._stack: Stack[Gradients] = Stack(self._count, add=add_lists)
        self._message = b""
        self._deposited: set[int] = set()
        self._left = False
        for param in self.params:
            param.grad = None

    def _set_shares(self, shares: Sequence[range]) -> None:
        self._shares, self._share_slots = shares, list(self._slots)
        self._shares_here = list(shares[self._first_rank : self._first_rank + self._plane.world])
        self._nodes = [nodes_of(share, self._count) for share in self._shares_here]
        held = [
            (slot, level, node)
            for slot, nodes in zip(self._share_slots, self._nodes, strict=True)
            for level, node in enumerate(nodes)
        ]
        ordered: list[Node] = [node for _, _, node in held]
        starts = tuple(self._buffer(slot, level).address for slot, level, _ in held)
        first_slot, first_level, _ = held[0] if held else (self._share_slots[0], 0, None)  # a host may have no slice
        total = self._segment("sums", self._buffer_bytes) if self.keeps_rows else self._buffer(first_slot, first_level)
        self._total_start, self._total = total.address, self.flat.views(self.params, total)
        if self._departures is None:
            self.program, self.starts = program(ordered, self._count), starts
        else:
            self._departures.arrange(shares, self._count, ordered, starts)
            self.program, self.starts = ONE, (self._total_start,)

    # ---- memory ----

    def _segment(self, name: str, num_bytes: int) -> Segment:
        if name not in self._segments:
            self._segments[name] = self._memory(name, num_bytes)
        return self._segments[name]

    def _buffer(self, slot: int, level: int) -> Segment:
        return self._segment(f"gradients {level} of slot {slot}", self._buffer_bytes)

    def _buffer_views(self, slot: int, level: int) -> list[Tensor]:
        buffer = self._buffer(slot, level)
        name = f"{level} {slot}"
        if name not in self._views:
            self._views[name] = self.flat.views(self.params, buffer)
        return self._views[name]

    def addresses(self, byte: int) -> list[int]:
        """The address `byte` bytes from the start of every buffer, in the order of the program."""
        return [start + byte for start in self.starts]

    def total_address(self, byte: int) -> int:
        """The same for the buffer that has the sums, after `total`."""
        return self._total_start + byte

    # ---- small messages that are sent with the gradients ----

    def can_carry(self, num_bytes: int) -> bool:
        """Whether all ranks can read every message of at most so many bytes after `finish`: if all are on one host."""
        self.notes.make_room(self._share_slots, max(map(len, self._nodes)), num_bytes)
        return self._across is None

    def carry(self, message: bytes) -> None:
        self._message = message

    def carried(self) -> list[bytes]:
        """Every share's message, followed by zeros; after `finish`."""
        return self.notes.messages()

    # ---- continuing without a lost rank ----

    def move(self, plane: Plane, slots: Sequence[int]) -> None:
        """Continue with these ranks, on this plane. A step in progress keeps its shares."""
        assert self._across is None
        self._plane, self._slots, self._shares = plane, list(slots), None

    def lost_shares(self) -> list[int]:
        """Shares of the current step whose rank is lost."""
        return [share for share, slot in enumerate(self._share_slots) if slot not in self._slots]

    # ---- backward ----

    def before_backward(self, v: int) -> None:
        self._overlapping = v == self._mine[-1]
        if self._overlapping:
            below, slot = list(self._stack.values()), self._share_slots[self._share_index]
            level = len(self._nodes[self._share_index]) - 1
            self._held, self._merging = below[:level], below[level:]
            self._target = self._buffer_views(slot, level)
            self._present = [True] * len(self.params)
            for lower, gradients in enumerate(self._held):
                for view, grad in zip(self._buffer_views(slot, lower), gradients, strict=True):
                    _copy(view, grad)

    def _when_there(self, index: int) -> Callable[[Tensor], None]:
        def arrived(param: Tensor) -> None:
            if not self._overlapping:
                return
            if index in self._deposited:
                raise _second_gradient()
            if index in self._large:
                self._deposit(index)
            if self._arrival is not None:
                self._arrival.append(index)
            if self._departures is not None:
                self._move_on(self._departures)

        return arrived

    def _move_on(self, departures: HierarchicalSum) -> None:
        """Complete the next buckets whose gradients have arrived, and send those that all ranks of this host have."""
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
            raise _second_gradient()
        everything = range(len(self.params))
        self._deposit_all([i for i in everything if i not in self._deposited] if self._deposited else everything)
        if self._departures is not None:
            self._departures.missing = [i for i, there in enumerate(self._present) if not there]
            self._departures.deposited(everything=True)
            self._departures.depart()

    def _deposit_all(self, indices: Sequence[int]) -> None:
        """Deposit all of them in one call, where each has a gradient and there is nothing to add."""
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
        """Take the last slice's gradient, add it to its node, and copy the result to the buffer."""
        self._deposited.add(index)
        grad = take(self.params[index])
        for lower in reversed(self._merging):
            left = lower[index]
            if left is not None:
                grad = left if grad is None else left.add_(grad)
        self._present[index] = grad is not None
        _copy(self._target[index], grad)

    # ---- after backward ----

    def finish_share(self) -> None:
        """All slices of this share are done."""
        if self._left:
            return
        self._left = True
        if not self.notes.has_room:
            self.can_carry(len(self._message))
        present = []
        if self._mine:
            present = [*([grad is not None for grad in gradients] for gradients in self._held), self._present]
        self.notes.write(self._share_index, present, self._message)

    def finish(self) -> None:
        """A barrier: afterwards every buffer and message can be read."""
        if self._mine:
            count_handed_over(self.flat.num_bytes * len(self._nodes[self._share_index]))
        self.finish_share()
        if self._departures is not None:
            if not self._mine:
                self._departures.missing = range(len(self.params))
            self._departures.deposited(everything=True)  # a rank without a slice has no gradients to wait for
            self._departures.depart(wait=True)
        self._plane.barrier(f"gradients of {self._name}")
        self.present = self.notes.present([len(nodes) for nodes in self._nodes])
        if self._across is not None and self._departures is not None:
            self._arrive(self._across, self._departures)

    def _arrive(self, across: HostAxis, departures: HierarchicalSum) -> None:
        flags = torch.zeros(len(self.params), dtype=torch.uint8)
        flags[self.present] = 1
        pending, gathered = across.any_start(flags, f"presence in {self._name}")
        departures.arrive(self._total_start)
        pending.wait()
        self.present = gathered.amax(0).nonzero().flatten().tolist()
        departures.keep_residuals(self.present)
        self.bytes_sent = departures.num_bytes
        if self._arrival is not None:
            departures.settle(self._arrival)
            self._hook_last_of_each(departures, self._arrival)
            self._arrival = None

    def _hook_last_of_each(self, departures: HierarchicalSum, arrival: list[int]) -> None:
        """Hook large parameters, and the last of each bucket: a hook for each small one costs more than its copy."""
        when = {index: time for time, index in enumerate(arrival)}
        last = {max(bucket.members, key=lambda i: when.get(i, -1)) for bucket in departures.order}
        self._hook(self._large | last)

    def total(self) -> list[Tensor]:
        """The sums, in shared memory, by parameter. Every rank sums its part; all parts are complete on return."""
        rank, world = self._plane.rank, self._plane.world
        for section in self.flat.sections if self._departures is None else ():  # else the sums have arrived already
            part = section.part(rank, world)
            sources = self.addresses(section.start_byte + part.start * section.dtype.itemsize)
            target = self.total_address(section.start_byte + part.start * section.dtype.itemsize)
            self._plane.sum_at(target, sources, len(part), section.dtype, self.program)
        self._plane.barrier(f"sums of {self._name}")
        return self._total

    def norm(self, total: Sequence[Tensor], factor: float) -> float:
        """The norm of the sums times a factor; ranks divide the work."""
        blocks = list(norm_blocks(total[index] for index in self.present))
        rank, world = self._plane.rank, self._plane.world
        mine = blocks[len(blocks) * rank // world : len(blocks) * (rank + 1) // world]
        squares = torch.zeros(-(-len(blocks) // world), dtype=torch.float64)
        squares[: len(mine)] = squares_of([block * factor for block in mine])
        gathered = torch.empty(world * len(squares), dtype=torch.float64)
        self._plane.all_gather(gathered, squares, "norm")
        sizes = [len(blocks) * (r + 1) // world - len(blocks) * r // world for r in range(world)]
        return norm_of(torch.cat([part[:size] for part, size in zip(gathered.view(world, -1), sizes, strict=True)]))

    def collect(self) -> None:
        """Copy the sums to `.grad`, None where no slice had a gradient."""
        total = self.total()
        for index in self.present:
            self.params[index].grad = total[index].clone()
        self._plane.barrier(f"copies of {self._name}")  # until then the next backward must not write to the buffers

    @property
    def segments(self) -> list[Segment]:
        return list(self._segments.values())

    def leave(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def close(self) -> None:
        """Also frees the memory, once all ranks have called this."""
        self.leave()
        self._plane.barrier("new layout")
        for segment in self._segments.values():
            if self._plane.rank == 0:
                segment.free()


def _second_gradient() -> TrainingFailed:
    return TrainingFailed(
        "A parameter received gradients twice in one backward pass, the second after the first was used.",
        fix=["torch.utils.checkpoint(..., use_reentrant=False)"],
    )


def _copy(view: Tensor, grad: Tensor | None) -> None:
    view.zero_() if grad is None else view.copy_(grad)
