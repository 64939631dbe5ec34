"""Collectives inside the forward pass, each with the matching collective in backward.

In a tensor-parallel layer, a tensor is either whole, with the same bits on every rank, or sharded along one dim. Four
operations convert between the two, each with the gradient that one process would have:

    enter    whole -> whole     input of a sharded operation; backward all-reduces the ranks' gradients
    leave_   partial -> whole   forward all-reduces; all ranks have the same gradient, so backward does nothing
    gather   parts -> whole     forward all-gathers; backward cuts
    cut      whole -> part      backward all-gathers

If each rank needs only a part of the sum, `leave_in_parts` reduce-scatters, and its backward all-gathers. If a whole
tensor was gathered from sequence parts, backward of `enter` reduce-scatters the gradients to these parts.

Parts may overlap: `gather` then adds the overlapping values, in rank order. All ranks make the same calls in the same
order, also in backward. Start reading at `Split`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from manyhands.comm.axis import Axis
from manyhands.parallel.model.tensor_shard import Range

__all__ = ["Ranges", "Split", "all_parts", "cut", "enter", "gather", "leave_", "leave_in_parts", "slices_in_order"]

Ranges = tuple[tuple[Range, ...], ...]
"""For each rank, the ranges of one dim that it has, in the order in which it stores them."""


def slices_in_order(size: int, parts: int) -> Ranges:
    """One range per rank; their sizes differ by at most one."""
    return tuple(((r * size // parts, (r + 1) * size // parts),) for r in range(parts))


class Split(NamedTuple):
    """How a tensor is sharded over the ranks of an axis: along one dim, into these ranges."""

    axis: Axis
    dim: int
    ranges: Ranges
    name: str
    """The name of the layer that communicates, for errors."""
    sequence: bool = False
    """Whether it is sharded along the sequence (a tensor that would otherwise be whole): evenly, one range each."""

    @property
    def mine(self) -> tuple[Range, ...]:
        return self.ranges[self.axis.rank]

    @property
    def size(self) -> int:
        """The size of the dim in the whole tensor."""
        return max(stop for ranges in self.ranges for _, stop in ranges)

    def part_size(self, rank: int) -> int:
        return sum(stop - start for start, stop in self.ranges[rank])

    @property
    def overlaps(self) -> bool:
        return sum(map(self.part_size, range(self.axis.size))) > self.size

    def part_of(self, tensor: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""
        pieces = [tensor.narrow(self.dim, start, stop - start) for start, stop in self.mine]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)


def enter(tensor: Tensor, axis: Axis, name: str) -> Tensor:
    """The same values; backward sums the ranks' gradients. Entering one tensor twice costs one sum."""
    if axis.size == 1 or not (torch.is_grad_enabled() and tensor.requires_grad):
        return tensor
    if tensor.is_leaf:  # outlives this pass, and must not keep its graph alive
        return cast(Tensor, _Enter.apply(tensor, axis, name))  # type: ignore[no-untyped-call]
    # Projections of one input, such as queries, keys and values, all-reduce once in backward instead of three times.
    before = getattr(tensor, "_entered", None)
    if before is not None and before[0] is axis and before[1] == tensor._version:
        return cast(Tensor, before[2])
    entered = _entered(tensor, axis, name)
    tensor._entered = (axis, tensor._version, entered)  # type: ignore[attr-defined]
    return entered


def _entered(tensor: Tensor, axis: Axis, name: str) -> Tensor:
    source = getattr(tensor, "_gathered_from", None)
    if source is None or source[2] != tensor._version or source[1].axis is not axis:
        return cast(Tensor, _Enter.apply(tensor, axis, name))  # type: ignore[no-untyped-call]
    part, split, _ = source
    return cast(Tensor, _EnterInParts.apply(part, tensor.detach(), split._replace(name=name)))  # type: ignore[no-untyped-call]


def leave_(tensor: Tensor, axis: Axis, name: str) -> Tensor:
    """The sum over the ranks, in place."""
    return cast(Tensor, _Leave.apply(tensor, axis, name)) if axis.size > 1 else tensor  # type: ignore[no-untyped-call]


def leave_in_parts(tensor: Tensor, split: Split) -> Tensor:
    """This rank's part of the sum over the ranks."""
    return cast(Tensor, _LeaveInParts.apply(tensor, split))  # type: ignore[no-untyped-call]


def gather(part: Tensor, split: Split) -> Tensor:
    """The whole tensor from all ranks' parts."""
    whole = cast(Tensor, _Gather.apply(part, split))  # type: ignore[no-untyped-call]
    if split.sequence and torch.is_grad_enabled():
        whole._gathered_from = (part, split, whole._version)  # type: ignore[attr-defined]
    return whole


def cut(whole: Tensor, split: Split) -> Tensor:
    """This rank's part of a whole tensor that every rank has."""
    return cast(Tensor, _Cut.apply(whole, split))  # type: ignore[no-untyped-call]


def sum_(tensor: Tensor, axis: Axis, name: str) -> Tensor:
    """Sum over the ranks, in place if its memory has no gaps. Half precision is summed in fp32 and rounded once."""
    wide = tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
    flat = _flat(wide)
    axis.sum_start(flat, name).wait()
    summed = flat.view_as(wide) if flat.data_ptr() != wide.data_ptr() else wide
    return summed if summed is tensor else tensor.copy_(summed)


def _sum_part(tensor: Tensor, split: Split) -> Tensor:
    """This rank's part of the sum over the ranks; half precision as in `sum_`."""
    wide = tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
    by_rank = wide.unflatten(split.dim, (split.axis.size, -1)).movedim(split.dim, 0)  # type: ignore[no-untyped-call]
    scratch = by_rank.clone(memory_format=torch.contiguous_format)
    part = torch.empty_like(scratch[0])
    split.axis.reduce_scatter(part, scratch, split.name)
    return part.to(tensor.dtype)


def _flat(tensor: Tensor) -> Tensor:
    """A flat view of its memory for any order of its dims; a copy if there are gaps."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    in_memory = tensor.permute(order)
    return in_memory.view(-1) if in_memory.is_contiguous() else tensor.contiguous().view(-1)


def _assemble(part: Tensor, split: Split) -> Tensor:
    parts = all_parts(part, split)
    sizes = list(part.shape)
    sizes[split.dim] = split.size
    make, overlaps = (part.new_zeros, True) if split.overlaps else (part.new_empty, False)
    whole = make(sizes)
    for ranges, other in zip(split.ranges, parts, strict=True):
        begin = 0
        for start, stop in ranges:
            target = whole.narrow(split.dim, start, stop - start)
            source = other.narrow(split.dim, begin, stop - start)
            target.add_(source) if overlaps else target.copy_(source)
            begin += stop - start
    return whole


def all_parts(part: Tensor, split: Split) -> list[Tensor]:
    """Every rank's part; parts of different sizes are sent with padding."""
    axis, shapes = split.axis, [_with_size(part.shape, split.dim, split.part_size(r)) for r in range(split.axis.size)]
    counts = [torch.Size(shape).numel() for shape in shapes]
    room = max(counts)
    mine = functional.pad(part.contiguous().view(-1), (0, room - part.numel()))
    gathered = part.new_empty(axis.size * room)
    if room:
        # As bytes: Gloo does not support every dtype.
        axis.all_gather_start(gathered.view(torch.uint8), mine.view(torch.uint8), split.name).wait()
    return [
        gathered[r * room : r * room + count].view(shape)
        for r, (count, shape) in enumerate(zip(counts, shapes, strict=True))
    ]


def _with_size(shape: Sequence[int], dim: int, size: int) -> list[int]:
    sizes = list(shape)
    sizes[dim] = size
    return sizes


def _same_memory(tensor: Tensor) -> Tensor:
    """Not a view: `enter` stores the result on its source, and a view would refer back to it: a reference cycle."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor)  # type: ignore[call-overload,no-any-return]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, name: str) -> Tensor:
        ctx.axis, ctx.name = axis, name
        return _same_memory(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # A gradient may be a view of memory that is still used elsewhere.
        return sum_(gradient.clone(), ctx.axis, f"{ctx.name}, backward"), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, name: str) -> Tensor:
        ctx.mark_dirty(tensor)
        return sum_(tensor, axis, name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


class _EnterInParts(torch.autograd.Function):
    """For a whole tensor that was gathered from `part`: backward reduce-scatters the gradients."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, whole: Tensor, split: Split) -> Tensor:
        ctx.split = split
        return _same_memory(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _sum_part(gradient, ctx.split._replace(name=f"{ctx.split.name}, backward")), None, None


class _LeaveInParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, split: Split) -> Tensor:
        ctx.split = split
        return _sum_part(tensor, split)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _assemble(gradient, ctx.split._replace(name=f"{ctx.split.name}, backward")), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, split: Split) -> Tensor:
        ctx.split = split
        return _assemble(part, split)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.split.part_of(gradient), None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, split: Split) -> Tensor:
        ctx.split = split
        return split.part_of(whole).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        split = ctx.split._replace(name=f"{ctx.split.name}, backward")
        return _assemble(gradient, split), None
